"""The examples of docs/guides/agents.md, sent to a server that only listens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtier.vllm.hints import HintParser, Prefetch, Release, Retain

PAGE = (Path(__file__).parents[2] / "docs/guides/agents.md").read_text()
ANSWER = {"choices": [{"text": "ls\n", "message": {"role": "assistant", "content": "ls"}}]}


class Listening:
    """A server, and what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        heard = self.heard

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                heard.append((self.path, json.loads(self.rfile.read(length))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(ANSWER).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def run(self, *command: str) -> None:
        """Run an example, whose address of the server is this one."""
        port = self.server.server_address[1]
        said = {"SERVER": f"http://127.0.0.1:{port}", "MODEL": "tiny", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            command, env=os.environ | said, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    def wishes(self) -> list[Any]:
        """What it was told of the use of blocks, as an engine understands it."""
        understanding = HintParser()
        found = [
            wish
            for _, body in self.heard
            for wish in understanding.parse(body["kv_transfer_params"], ())
        ]
        assert not any(understanding.ignored.values())
        assert all(body["model"] == "tiny" for _, body in self.heard)
        return found


@pytest.fixture
def listening() -> Iterator[Listening]:
    server = Listening()
    yield server
    server.close()


def example(kind: str) -> str:
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_with_curl(listening: Listening) -> None:
    listening.run("bash", "-euc", example("sh"))
    assert listening.wishes() == [Retain("agent-7", 300.0), Release("agent-7")]
    assert {path for path, _ in listening.heard} == {"/v1/chat/completions"}


def test_with_python(listening: Listening) -> None:
    listening.run(sys.executable, "-c", example("python"))
    assert listening.wishes() == [
        Retain("agent-8", 120.0),
        Prefetch("agent-8"),
        Retain("agent-8"),
        Release("agent-8"),
    ]
