"""The tests' end of `host.py`: starts it, tells it what to do, kills it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from engines.fork_server import Child, fork_server

HOST = Path(__file__).with_name("hosts") / "host.py"
HANGS_S = 600.0
_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_offload_|\S*cpushm_)\S*")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def _python_path() -> list[str]:
    """The folders that were named when the tests were started: another vLLM, maybe."""
    named = os.environ.get("PYTHONPATH", "")
    return [str(Path(each).absolute()) for each in named.split(os.pathsep) if each]


class EngineError(Exception):
    """The engine refused, or died."""


class Engine:
    """One engine in a process; every method that is not defined here is one of its commands."""

    def __init__(
        self,
        log: Path,
        *,
        host: Path = HOST,
        fresh: bool = False,
        stack: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.log = log
        self._unread = b""
        self._start(host, environment or {}, fresh=fresh)
        if stack is not None:
            transfer = connector(stack)
        if transfer is not None:
            arguments["kv_transfer_config"] = transfer
            arguments.setdefault("prefix_caching_hash_algo", "sha256_cbor")
        try:
            self.call("start", **arguments)
        except BaseException:
            self.kill()
            raise

    def _start(self, host: Path, environment: Mapping[str, str], *, fresh: bool) -> None:
        """In a process that has imported vLLM already, unless that is to be done anew."""
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(HOST.parent), *_python_path()]),
            **environment,
        }
        self._answers, answers = os.pipe()
        read, commands = os.pipe()
        self._commands = os.fdopen(commands, "wb")
        with self.log.open("ab") as log:
            files = [read, log.fileno(), log.fileno()]
            server = None if fresh else fork_server(environment)
            self.process: Child | subprocess.Popen[bytes]
            if server is not None:
                self.process = server.start(str(host), answers, files, environment)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, str(host), str(answers)],
                    stdin=read,
                    stdout=log,
                    stderr=log,
                    pass_fds=(answers,),
                    start_new_session=True,
                    env=environment,
                )
        os.close(answers)
        os.close(read)

    def call(self, name: str, seconds: float = HANGS_S, **arguments: Any) -> Any:
        """Run a command; raises EngineError if it fails, or takes too long."""
        try:
            self._commands.write(json.dumps([name, arguments]).encode() + b"\n")
            self._commands.flush()
        except BrokenPipeError:
            raise EngineError(f"the engine is gone\n{self.tail()}") from None
        answer = json.loads(self._line(name, time.monotonic() + seconds))
        if "error" in answer:
            raise EngineError(f"{name}: {answer['error']}\n{self.tail()}")
        return answer["value"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **arguments: self.call(name, **arguments)

    def _line(self, name: str, end: float) -> bytes:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise EngineError(f"{name} takes too long\n{self.tail()}")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise EngineError(f"the engine died in {name}\n{self.tail()}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def tail(self) -> str:
        """The end of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def kill(self) -> None:
        """kill -9, with everything that belongs to the engine."""
        kill_group(self.process)
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
            with contextlib.suppress(BrokenPipeError):
                self._commands.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def kill_group(process: Child | subprocess.Popen[bytes]) -> None:
    """kill -9, all processes of its group; what vLLM's share goes with them."""
    left = shared_by(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in left:
        path.unlink(missing_ok=True)


def shared_by(group: int) -> set[Path]:
    """The shared memory of vLLM's own, by way of which its processes talk: hundreds of MiB, which
    nobody removes when they are killed. (kvtier's is the test's.)"""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(maps.parent.name)) == group:
                found |= {Path(name) for name in _SHARED.findall(maps.read_text())}
    return found


def connector(stack: Mapping[str, Any]) -> dict[str, Any]:
    """The value of --kv-transfer-config for a stack."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"stack": stack},
    }
