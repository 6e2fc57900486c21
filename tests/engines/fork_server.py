"""A process that has imported vLLM, or SGLang, and forks engines: most of their start is importing.

    python fork_server.py FD      # orders come from the socket FD, and answers go there

What it forks is as one that was started: a process of its own, with a session, an environment and
a folder of its own, which dies of a kill as any other. It has only the seed of Python's hashes in
common with its siblings; so there are two of these for an environment, and an engine and the next
one never share it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_VLLM = ("vllm", "vllm.entrypoints.llm", "vllm.config")
_SGLANG = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)
_ORDER_BYTES_MAX = 1 << 20
_SEEDS = 2
_ENVIRONMENTS_MAX = 2
"""Each process keeps half a GiB. Engines whose environment is a further one are started anew."""
_READ_LATE = ("PYTEST_CURRENT_TEST", "AWS_", "ONEDNN_", "VLLM_PP_")
"""Nothing that is imported looks at what begins so."""


class ForkServer:
    """The tests' end. Its engines die with the tests' process, since nobody tells them anything
    any more."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
            )
        atexit.register(self._close)

    def start(
        self, script: str, answers: int, files: Sequence[int], environment: Mapping[str, str]
    ) -> Child:
        """Run a script in a new process, with these files as its standard ones."""
        order = {"script": script, "folder": str(Path.cwd()), "environment": dict(environment)}
        return Child(self, self._ask(order, [answers, *files]))

    def reap(self, pid: int) -> None:
        """Return when this child has ended."""
        self._ask({"reap": pid})

    def _ask(self, order: dict[str, Any], files: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], list(files))
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the process that forks engines is gone")
        return int(answer)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


class Child:
    """A process that was forked, as far as `subprocess.Popen` is needed."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server: ForkServer | None = server

    def wait(self) -> None:
        """Return when it has ended."""
        server, self._server = self._server, None
        if server is not None:
            server.reap(self.pid)


_servers: dict[frozenset[tuple[str, str]], list[ForkServer]] = {}
"""By the environment in which they have imported what they fork."""


def fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """The one whose turn it is; None if there is none for this environment."""
    lasting = frozenset(each for each in environment.items() if not each[0].startswith(_READ_LATE))
    if lasting not in _servers and len(_servers) == _ENVIRONMENTS_MAX:
        return None
    alike = _servers.setdefault(lasting, [])
    alike.append(ForkServer(environment) if len(alike) < _SEEDS else alike.pop(0))
    return alike[-1]


# -- the process -------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> str | None:
    """Fork what is ordered; the name of the script that it is to run, in a child."""
    while True:
        data, files, _, _ = socket.recv_fds(orders, _ORDER_BYTES_MAX, 4)
        if not data:
            return None
        order = json.loads(data)
        if "reap" in order:
            os.waitpid(order["reap"], 0)
            orders.send(b"0")
            continue
        if not os.fork():
            os.setsid()  # before anybody knows whom to kill
            orders.send(str(os.getpid()).encode())
            orders.close()
            return _become(order, *files)
        for file in files:
            os.close(file)


def _become(order: dict[str, Any], answers: int, *standard: int) -> str:
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    script: str = order["script"]
    sys.argv = [script, str(answers)]
    return script


def _import_engine() -> None:
    """Whose environment this is."""
    spec = find_spec("sglang")
    names = _SGLANG if spec is not None and spec.origin is not None else _VLLM
    for name in names:
        import_module(name)


def main() -> None:
    _import_engine()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    gc.freeze()
    script = _serve(socket.socket(fileno=int(sys.argv[1])))
    if script is None:
        os._exit(0)  # libraries would tell what they leak
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
