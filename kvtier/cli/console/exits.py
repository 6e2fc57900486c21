"""How commands end: exit codes, errors in one sentence each, and a mistake in kvtier itself.

Exit codes: 0 all is well, 1 something was found or failed, 2 the call or the configuration is
wrong, 130, 143 and 129 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvtier.cli.console.output import OUTPUT, warn
from kvtier.cli.signals import EndSignal
from kvtier.errors import MORE_MEMORY, ConfigError, ConfigErrors, KVTierError, said_of

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CLOSED_PIPE = 141

_MORE_THREADS = "raise the limit (ulimit -u and -v, or the container's of pids and memory)"


def explain(error: KVTierError | OSError) -> int:
    """Say what went wrong in one sentence a mistake, and answer the exit code."""
    if isinstance(error, ConfigErrors):
        for each in error.errors:
            warn(str(each))
    else:
        warn(said_of(error))
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def end_output(code: int) -> int:
    """Write what is still buffered, which may fail only now; answers the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, EndSignal) as error:
        # What cannot be written goes nowhere, or the interpreter would try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, EndSignal):  # nobody reads on, as in a pager
            return 128 + error.number
        if isinstance(error, BrokenPipeError):
            return EXIT_CLOSED_PIPE
        error.filename = OUTPUT
        return explain(error)
    return code


def report_crash(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """`sys.excepthook` of the command line: a mistake in kvtier itself, without a traceback."""
    if os.environ.get("KVTIER_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, MemoryError):
        warn(f"Cannot allocate memory; {MORE_MEMORY}")
    elif str(error) == "can't start new thread":  # for which Python has no type of its own
        warn(f"no more threads can be started here; {_MORE_THREADS}")
    else:
        warn(
            f"a mistake in kvtier: {kind.__name__}: {error}; "
            "please report it with what KVTIER_TRACEBACK=1 prints"
        )
