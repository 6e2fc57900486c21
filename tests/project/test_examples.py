"""Every example runs as it stands (examples/custom_tier has a test of its own)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_embedded(tmp_path: Path) -> None:
    page = EXAMPLES.parent / "docs" / "reference" / "library.md"
    program = (EXAMPLES / "embedded.py").read_text(encoding="utf-8")
    assert f"```python\n{program}```" in page.read_text(encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "embedded.py"), str(tmp_path / "blocks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "nvme   100 blocks,  100 hits" in done.stdout


def test_ask_says_at_once_that_a_file_is_missing(tmp_path: Path) -> None:
    """And does not wait for a server first."""
    command = [sys.executable, str(EXAMPLES / "ask.py"), "http://127.0.0.1:9", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'x'}: No such file or directory\n"


Asked = tuple[str, str | None, bytes]


@contextmanager
def stand_in(
    answers: dict[str, object], key: str | None = None
) -> Iterator[tuple[str, list[Asked]]]:
    """A server that has an answer for each path, below /v1 for who has the key if there is one;
    with what it was asked for, by which key, and what it was sent."""
    asked: list[Asked] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            given = self.headers["Authorization"]
            asked.append((self.path, given, body))
            shut = key is not None and self.path.startswith("/v1/") and given != key
            self.send_response(401 if shut else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_ask_takes_an_address_alone_and_leaves_empty_lines_out(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n\n')
    usage = {"prompt_tokens": 7, "prompt_tokens_details": None}
    answers = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": {"usage": usage}}
    with stand_in(answers) as (address, _):
        command = [sys.executable, str(EXAMPLES / "ask.py"), address, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line[:18] for line in done.stdout.splitlines()] == [
        "prompt 1: 7 tokens",
        "prompt 2: 7 tokens",
    ]


def test_ask_shows_the_key_that_a_server_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n')
    usage = {"prompt_tokens": 7, "prompt_tokens_details": None}
    answers = {"/v1/models": {"data": [{"id": "m"}]}, COMPLETIONS: {"usage": usage}}
    with stand_in(answers, key="Bearer key") as (address, _):
        command = [sys.executable, str(EXAMPLES / "ask.py"), address, str(file)]
        for key, says in (("key", "prompt 1: 7 tokens"), ("other", "/v1/models answers 401")):
            environment = os.environ | {"VLLM_API_KEY": key}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, env=environment
            )
            assert says in done.stdout + done.stderr
            assert "Traceback" not in done.stderr


COMPLETIONS = "/v1/completions"


@contextmanager
def routing(*servers: str) -> Iterator[str]:
    """A router before these; where it takes completions."""
    command = [sys.executable, str(EXAMPLES / "router.py"), *servers, "--port", "0"]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert router.stdout is not None
        yield f"{router.stdout.readline().strip()}{COMPLETIONS}"
    finally:
        router.kill()
        router.communicate()


def test_servers_behind_a_router_are_shown_the_key() -> None:
    with (
        stand_in({COMPLETIONS: {"kv_transfer_params": {}}}) as (first, computed),
        stand_in({COMPLETIONS: {"text": "yes"}}) as (second, answered),
        routing(f"http://{first}", f"http://{second}") as url,
    ):
        request = urllib.request.Request(url, b"{}", {"Authorization": "Bearer key"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer) == {"text": "yes"}
    assert [each[:2] for each in (*computed, *answered)] == [(COMPLETIONS, "Bearer key")] * 2


@pytest.mark.parametrize("body", [b"[5]", (b"[", b"5]")], ids=["whole", "in chunks"])
def test_a_router_passes_on_what_is_no_prompt(body: bytes | tuple[bytes, ...]) -> None:
    with (
        stand_in({}) as (first, computed),
        stand_in({COMPLETIONS: {"text": "yes"}}) as (second, answered),
        routing(f"http://{first}", f"http://{second}") as url,
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer,
    ):
        assert json.load(answer) == {"text": "yes"}
    assert (computed, answered) == ([], [(COMPLETIONS, None, b"[5]")])


@pytest.mark.parametrize(
    "request_end",
    [
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n[5",
        b"Transfer-Encoding: chunked\r\n\r\n?\r\n[5]",
        b"Content-Length: some\r\n\r\n[5]",
    ],
    ids=["cut short", "no length", "no number"],
)
def test_a_router_refuses_a_body_of_which_nobody_can_say_where_it_ends(request_end: bytes) -> None:
    with routing("http://127.0.0.1:9", "http://127.0.0.1:9") as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), timeout=60) as client:
            client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n".encode() + request_end)
            client.shutdown(socket.SHUT_WR)
            assert client.makefile().readline().startswith("HTTP/1.0 400 nobody can say")


def stored(medium: str, first: int, blocks: int) -> dict[str, object]:
    """Of a prompt 0, 1, 2, ... in blocks of four tokens, whose hashes are 10, 11, 12, ..."""
    return {
        "type": "BlockStored",
        "block_hashes": [10 + each for each in range(first, first + blocks)],
        "parent_block_hash": 9 + first if first else None,
        "token_ids": list(range(4 * first, 4 * (first + blocks))),
        "block_size": 4,
        "medium": medium,
    }


def test_a_router_follows_what_servers_announce() -> None:
    """By medium; and it knows nothing of one of which it has missed something."""
    from examples.router import Cached

    cached, prompt = Cached(), list(range(18))
    assert cached.worth(prompt) == 0
    window = stored("CPU", 0, 4) | {"kv_cache_spec_kind": "sliding_window"}
    salted = stored("CPU", 0, 4) | {"extra_keys": [["salt"], None, None, None]}
    others = [window, salted, stored("CPU", 0, 4) | {"lora_name": "tuned"}]
    cached.hear(0, [stored("GPU", 0, 1), stored("CPU", 0, 2), stored("STORAGE", 2, 2), *others])
    assert cached.worth(prompt) == pytest.approx(4 + 4 * 0.8 + 8 * 0.4)
    assert cached.worth([*prompt[:5], 0, *prompt[6:]]) == 4
    gone = {"type": "BlockRemoved", "block_hashes": [10, 11], "medium": "CPU"}
    cached.hear(1, [gone])
    assert cached.worth(prompt) == 4, "the block behind is nowhere"
    cached.hear(2, [stored("CPU", 1, 1)])
    assert cached.worth(prompt) == pytest.approx(4 + 4 * 0.8 + 8 * 0.4)
    cached.hear(4, [stored("GPU", 0, 1)])
    assert cached.worth(prompt) == 4
    cached.hear(5, [{"type": "AllBlocksCleared"}])
    assert cached.worth(prompt) == 0


def test_a_router_says_what_it_lacks() -> None:
    command = [sys.executable, str(EXAMPLES / "router.py"), "http://one", "--events", "a", "b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "give as many --events as servers; or two servers, and no --events" in done.stderr
