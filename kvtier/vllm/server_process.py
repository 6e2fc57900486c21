"""A `kvtier serve` in a process of its own, for the demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from kvtier.errors import KVTierError
from kvtier.vllm.hooks.versions import SERVER

_START_S = 300.0
_SETTLE_S = 30.0
_POLL_S = 0.1
_KILL_POLL_S = 0.01
_TIDY_S = 10.0
_TIDIES = b"multiprocessing.resource_tracker"
_END_LINES = 30
_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind\.")


_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_ENGINES = ("engine", "model_name")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The numbers of a /metrics, by name and labels."""


def samples_of(text: str) -> Samples:
    """The samples of a /metrics, those of several engines added up."""
    found: Samples = {}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        pairs = _LABEL.findall(sample[2] or "")
        key = (sample[1], frozenset(pair for pair in pairs if pair[0] not in _OF_ENGINES))
        found[key] = found.get(key, 0.0) + value
    return found


class NotStarted(KVTierError):
    """vLLM did not start: `lines` are the end of its log."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("vLLM did not start; the end of its log:\n" + "\n".join(lines))
        self.lines = lines


class Server:
    """Started by `start`, ended by `kill` or the end of a `with`."""

    def __init__(self, process: subprocess.Popen[bytes], port: socket.socket, log: Path) -> None:
        self.process = process
        self._port = port
        self.url = f"http://127.0.0.1:{port.getsockname()[1]}"
        self.log = log
        self.started_in = 0.0

    @classmethod
    def start(
        cls,
        model: str,
        stack: Path | None,
        flags: Sequence[str] = (),
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        uncut: AbstractContextManager[None] | None = None,
    ) -> Self:
        """Start a server on a free port and wait until it answers; without a stack, plain vLLM.
        What may end the caller at any time waits for as long as the block `uncut` lasts: a process
        that it does not know yet would live on."""
        taken = _take_port()
        port = taken.getsockname()[1]
        flags = [*flags, "--host", "127.0.0.1", "--port", str(port)]
        if stack is None:
            command = [sys.executable, "-m", SERVER, "--model", model, *flags]
        else:
            command = [sys.executable, "-P", "-m", "kvtier", "serve", model]
            command += ["--config", str(stack), "--", *flags]
        server = None
        try:
            with log.open("ab") as output, uncut or contextlib.nullcontext():
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # In development mode vLLM offers to empty its cache.
                    env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **(environment or {})},
                )
                server = cls(process, taken, log)
            server._wait_until_up()
        except BaseException:
            if server is not None:
                server.kill()
            raise
        return server

    def _wait_until_up(self) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < _START_S:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, HTTPException):
                self.get("/health")
                self.started_in = time.monotonic() - begin
                return
            time.sleep(_POLL_S)
        raise NotStarted(_end_of(self.log))

    # -- requests --------------------------------------------------------------------------

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: object = None, seconds: float = 300) -> Any:
        """The body of a POST, decoded if it is JSON."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def complete(self, model: str, prompt: str | list[int], tokens: int, **more: Any) -> str:
        """Continue a prompt with the likeliest tokens."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = self.post("/v1/completions", {**body, "ignore_eos": True, **more})
        return str(answer["choices"][0]["text"])

    def forget_engine_cache(self) -> None:
        """Empty vLLM's own prefix cache, and nothing of kvtier's."""
        self.post("/reset_prefix_cache")

    # -- metrics -----------------------------------------------------------------------------

    def metrics(self) -> Samples:
        """All samples of /metrics."""
        return samples_of(self.get("/metrics"))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(
            value
            for (each, found), value in self.metrics().items()
            if each == name and wanted <= found
        )

    def settle(self) -> None:
        """Wait until everything that was stored has reached every tier."""
        end = time.monotonic() + _SETTLE_S
        last: object = None
        while time.monotonic() < end:
            found = self.metrics()
            now = {key: value for key, value in found.items() if key[0].startswith("kvtier:")}
            waiting = sum(
                value
                for (name, _), value in now.items()
                if name in ("kvtier:queued_blocks", "kvtier:waiting_blocks")
            )
            if not waiting and now == last:
                return
            last = now
            time.sleep(0.8)  # the counters are told twice a second, if nothing keeps them

    # -- the end -----------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9, the server and all of its processes but those that tidy up after them: what
        these would remove of shared memory and semaphores is vLLM's, and would stay for ever."""
        end = time.monotonic() + _TIDY_S
        while alive := _session(self.process.pid):
            tidying = {pid for pid in alive if _TIDIES in _command(pid)}
            for pid in alive - (tidying if time.monotonic() < end else set()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(_KILL_POLL_S)
        self.process.wait()
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _end_of(log: Path) -> list[str]:
    """The last lines, without what a library has to say of itself when a process ends badly."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if not _NOISE.match(line)][-_END_LINES:]


def _take_port() -> socket.socket:
    """A free port that nobody else is given while the server starts.

    vLLM binds to it all the same: of several that reuse an address only one may listen.
    """
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    return taken


def _session(leader: int) -> set[int]:
    """The live processes of a session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, session, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(session) == leader and state not in b"ZX":
                found.add(int(stat.parent.name))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
