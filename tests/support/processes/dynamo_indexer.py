"""Dynamo's own indexer (`dynamo.indexer` of ai-dynamo-runtime), which decodes events of engines and
says how much of a prompt each of these has. `make test-doors` installs it beside the tests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from support.object.object_servers import free_port

PYTHON = Path(__file__).parents[3] / ".venv-doors/bin/python"
PATIENCE_S = 240.0  # against a hang; processors may be busy
MODEL, WORKER = "model", 1


class Overlap(NamedTuple):
    """How many tokens of a prompt's beginning an engine has: on its device; with what its CPU
    memory has behind these; and with what lies on a disk behind both."""

    gpu: int
    cpu: int
    disk: int


class Indexer:
    """A process of its own."""

    def __init__(self, log: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        until(self._is_up)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "it has ended"
        try:
            self._call("/workers")
        except URLError:
            return False
        return True

    def listen_to(self, endpoint: str, replay: str, block_tokens: int) -> None:
        """Hear of an engine, which is a new one: forget what was heard before."""
        known = {"instance_id": WORKER, "model_name": MODEL}
        if self._call("/workers"):
            self._call("/unregister", known)
        ends = {"endpoint": endpoint, "replay_endpoint": replay, "block_size": block_tokens}
        self._call("/register", known | ends)

    def overlap(self, tokens: Sequence[int], **more: Any) -> Overlap:
        """What the engine has of a prompt."""
        found = self._call("/query", {"token_ids": list(tokens), "model_name": MODEL, **more})
        said = found["instances"].get(str(WORKER), {})
        return Overlap(*(said.get(tier, 0) for tier in Overlap._fields))

    def _call(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what will be so."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.005)
