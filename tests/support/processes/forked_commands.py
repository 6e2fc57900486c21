"""Commands in processes that are forked from one that has imported what they import.

    python forked_commands.py FD      # orders come from the socket FD

Most of a command's processor time is importing. What is forked is as one that was started: a
process with streams, a folder and an environment of its own, which ends by an exit code. The files
of the commands themselves are imported there, so that one that imports too little is found.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_ORDER_BYTES_MAX = 1 << 20
_IMPORTED = (
    "kvtier.cli.app",
    "kvtier.cli.options",
    "kvtier.cli.inspect",
    "kvtier.backends.cpu.inspect",
    "kvtier.backends.nvme.inspect",
    "kvtier.backends.object.inspection.inspector",
)
_TYPERS_OWN = "typer._adapters"
"""Imports pydantic, if that is installed, when the first option is read; some versions have it."""
_PYTHONS_OWN = ("PYTHON", "LANG", "LC_", "TERM")
"""What begins so, Python or its libraries read when they start: other values, another process."""


class ForkServer:
    """The tests' end. It serves one test process, and ends with it."""

    def __init__(self) -> None:
        self._environment = _lasting(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # numpy's threads would not be there in a process that is forked
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        atexit.register(self._close)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether Python would start in the same way with this environment."""
        return _lasting(environment) == self._environment

    def run(
        self, script: str, arguments: list[str], environment: Mapping[str, str], typed: str
    ) -> tuple[int, str, str]:
        """What the script's process ends with, and what it says on its two streams."""
        order = {"script": script, "arguments": arguments, "folder": str(Path.cwd())}
        order |= {"environment": dict(environment)}
        pipes = [os.pipe() for _ in range(4)]
        (stdin, write), (out, stdout), (err, stderr), (ended, end) = pipes
        message = json.dumps(order).encode()
        socket.send_fds(self._socket, [message], [stdin, stdout, stderr, end])
        for file in (stdin, stdout, stderr, end):
            os.close(file)
        os.write(write, typed.encode())  # a few words: a pipe holds them
        os.close(write)
        said = {out: b"", err: b"", ended: b""}
        waiting = set(said)
        while waiting:
            for file in select.select(waiting, [], [])[0]:
                piece = os.read(file, 1 << 16)
                said[file] += piece
                if not piece:
                    waiting.remove(file)
                    os.close(file)
        code = os.waitstatus_to_exitcode(int(said[ended]))
        return code, said[out].decode(), said[err].decode()

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(_PYTHONS_OWN)]
    return {name: environment[name] for name in names if name != "PYTHONPATH"}


# -- the process -----------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> None:
    """Fork what is ordered, and tell how it ended."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([orders, *running], [], [])[0]:
            if ready is not orders:
                pid, end = running.pop(ready)
                os.write(end, str(os.waitpid(pid, 0)[1]).encode())
                os.close(end)
                os.close(ready)
                continue
            data, files, _, _ = socket.recv_fds(orders, _ORDER_BYTES_MAX, 4)
            if not data:
                return
            *standard, end = files
            pid = os.fork()
            if not pid:
                for other in (
                    end,
                    orders.detach(),
                    *running,
                    *(end for _, end in running.values()),
                ):
                    os.close(other)
                _become(json.loads(data), standard)
            running[os.pidfd_open(pid)] = pid, end
            for file in standard:
                os.close(file)


def _become(order: dict[str, Any], standard: list[int]) -> NoReturn:
    """Run the script as Python would, from its beginning to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _as_new(getattr(sys, name), number))
    os.chdir(order["folder"])
    sys.path[:] = [path for path in sys.path if path not in _python_path(os.environ)]
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = [str(Path(order["script"]).parent), *_python_path(os.environ)]
    importlib.invalidate_caches()
    sys.argv = [order["script"], *order["arguments"]]
    from kvtier.cli.main import main

    main()
    raise AssertionError("it does not return")


def _as_new(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """A standard stream as Python opened it, but for what that stream knows of its file."""
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    buffer: Any = raw
    if not stream.write_through:
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _python_path(environment: Mapping[str, str]) -> list[str]:
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(each).absolute()) for each in named if each]


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for the commands
    del sys.path[0]  # this folder
    for name in _IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_TYPERS_OWN)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
