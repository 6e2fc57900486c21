"""Parts of a benchmark, each in a process of its own with a limit of time.

Time on a GPU is short: a part that hangs is ended, and says where it was; one that loses the device
leaves the next one another start; what was measured by then is kept.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import Figure, Report

PART_SECONDS = 120.0
"""For one part; less than a minute is usual."""
_GRACE = 10.0
"""For a process to end by itself after its time is over."""


class _Part(Report):
    """Its figures are sent to whoever started its process."""

    def __init__(self, title: str, connection: Connection) -> None:
        super().__init__(title)
        self._connection = connection

    def keep(self, figure: Figure) -> None:
        self._connection.send(figure)


def run_part(measure: Callable[[Report], object], report: Report, seconds: float) -> bool:
    """Measure in a process of its own; whether it came to its end. Figures come at once."""
    return _in_process(
        lambda connection: measure(_Part(report.title, connection)), report.keep, seconds
    )


def answer_of(ask: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own; None if that fails."""
    answers: list[Any] = []
    _in_process(lambda connection: connection.send(ask()), answers.append, 60.0)
    return answers[-1] if answers else None


def _in_process(
    work: Callable[[Connection], object], keep: Callable[[Any], object], seconds: float
) -> bool:
    # Forked: it has what was imported and set here. CUDA allows that as long as this process has
    # not used it.
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)
        status = 1
        try:
            work(there)
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        sys.stdout.flush()
        # At once: what is left, like threads that wait for a lost device, could keep it for ever.
        os._exit(status)

    process = context.Process(target=run)
    process.start()
    there.close()
    end = time.monotonic() + seconds + _GRACE
    while here.poll(max(0.0, end - time.monotonic())):
        try:
            said = here.recv()
        except EOFError:
            break
        keep(said)
    process.join(_GRACE)
    if process.exitcode is None:
        process.kill()
        process.join(_GRACE)
    here.close()
    return process.exitcode == 0
