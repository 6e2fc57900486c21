"""Engines in processes of their own: nobody waits for one longer than allowed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from engines.engine import kill_group

_ERROR = re.compile(r"\w(Error|Exception): \S")
Answer = dict[str, Any]


class EngineFailed(Exception):
    """An engine did not do what it was asked to, and why as far as it is known."""


class Engine:
    """A process group, ended with all that it started."""

    def __init__(
        self,
        name: str,
        log: Path,
        arguments: Mapping[str, Any],
        vocabulary: int,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._log = log
        wanted = json.dumps({"arguments": arguments, "vocabulary": vocabulary})
        with log.open("ab") as file:
            self._began = file.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_engine.engine_process", wanted],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def ready(self, seconds: float) -> Answer:
        """What it says when it can be asked."""
        return self._answer(seconds, "start")

    def ask(self, seconds: float, do: str, **command: Any) -> Answer:
        """What it answers to a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{self.name}: {do}: {error}; {self._last_words()}") from error
        return self._answer(seconds, do)

    def _answer(self, seconds: float, do: str) -> Answer:
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise EngineFailed(f"{self.name}: {do} takes longer than {seconds:.0f} s") from None
            if not line:
                raise EngineFailed(f"{self.name}: {do}: it died; {self._last_words()}")
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    break
        if "error" in answer:
            raise EngineFailed(f"{self.name}: {do}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last error in the log."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[self._began :].decode(errors="replace")
            lines = [line for line in text.splitlines() if "See root cause" not in line]
            errors = [line.strip() for line in lines if _ERROR.search(line)]
            return (errors or text.strip().splitlines() or ["it said nothing"])[-1][-300:]
        return "it said nothing"

    def stop(self, seconds: float) -> float:
        """End it in order; how long that took."""
        began = time.monotonic()
        try:
            self.ask(seconds, "stop")
            self._process.wait(max(1.0, seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"{self.name}: it has not ended in {seconds:.0f} s") from None
        finally:
            self.kill()
        return time.monotonic() - began

    def kill(self) -> None:
        """As `kill -9`, and all of its processes."""
        kill_group(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
