"""Send each prompt to the server that has most of it, as their KV events say:

python examples/router.py http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000 \\
    --events tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

Without events: let the first server compute prompts and the second one answer them, by way of a
folder that both have. So long prompts hold up nobody's answer. Whatever the first one does, the
second one answers.

This is the least that there can be. Other routers that hear KV events, or speak of vLLM's
`do_remote_decode`, will do as well.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600
PROMPTS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
OF_THE_ANSWER = ("min_tokens", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs")
OF_THE_PROMPT = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
WEIGHTS = {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.4}
"""What a cached token is worth where it is: a load takes longer from a disk."""
WHOLE_PROMPTS = ("full_attention", "mla_attention", "sink_full_attention")
"""The kinds of blocks by which one can tell how much of a prompt is there."""


class Cached:
    """What a server has, as its events say it. Of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._forget()

    def _forget(self) -> None:
        self._block_tokens = 0
        self._after: dict[tuple[Any, tuple[int, ...]], Any] = {}
        """The block behind another one, by its tokens."""
        self._places: dict[Any, tuple[set[str], tuple[Any, tuple[int, ...]]]] = {}

    def hear(self, number: int, events: Sequence[dict[str, Any]]) -> None:
        """Events come with numbers: if some are missing, or the server is another one, nothing is
        known any more."""
        with self._lock:
            if number != self._next:
                self._forget()
            self._next = number + 1
            for event in events:
                if event["type"] == "AllBlocksCleared":
                    self._forget()
                elif event["type"] == "BlockRemoved":
                    self._remove(event)
                elif event.get("kv_cache_spec_kind", WHOLE_PROMPTS[0]) in WHOLE_PROMPTS:
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        if event.get("lora_name") or any(event.get("extra_keys") or ()):
            return  # of an adapter, a salt or an image: its tokens alone do not tell what it is
        size, before = event["block_size"], event.get("parent_block_hash")
        self._block_tokens = size
        for at, block in enumerate(event["block_hashes"]):
            edge = before, tuple(event["token_ids"][at * size : (at + 1) * size])
            self._after[edge] = block
            media, _ = self._places.setdefault(block, (set(), edge))
            media.add(event.get("medium") or "GPU")
            before = block

    def _remove(self, event: dict[str, Any]) -> None:
        for block in event["block_hashes"]:
            media, edge = self._places.get(block, (set(), None))
            media.discard(event.get("medium") or "GPU")
            if edge is not None and not media:
                del self._places[block], self._after[edge]

    def worth(self, tokens: Sequence[int]) -> float:
        """How much of a prompt is there, weighted by where it is."""
        total, before = 0.0, None
        with self._lock:
            size = self._block_tokens or len(tokens) + 1
            for at in range(0, len(tokens) - size + 1, size):
                before = self._after.get((before, tuple(tokens[at : at + size])))
                if before is None:
                    break
                media, _ = self._places[before]
                total += size * max(WEIGHTS.get(medium, 0.0) for medium in media)
        return total

    def listen(self, endpoint: str) -> None:
        """Hear what a server publishes, for ever."""
        import msgspec
        import zmq

        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(endpoint)
        while True:
            _, number, payload = socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            self.hear(int.from_bytes(number, "big"), events)


class Router(BaseHTTPRequestHandler):
    """Answers for the servers."""

    servers: list[str]
    caches: list[Cached]
    """What each server has, if they tell."""
    waiting: list[int]
    """How many requests each one is asked at the moment."""

    def do_GET(self) -> None:
        self.pass_on(b"")

    def do_POST(self) -> None:
        try:
            if self.headers["Transfer-Encoding"]:
                body = b"".join(self.chunks())
            else:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        except ValueError:
            self.send_error(400, "nobody can say where this body ends")
            return
        if self.path not in PROMPTS:
            self.pass_on(body)
        elif self.caches:
            self.pass_on(body, self.nearest(body))
        else:
            self.pass_on(self.handed_over(body))

    def chunks(self) -> Iterator[bytes]:
        """A body whose length nobody said, to its end."""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def nearest(self, body: bytes) -> int:
        """The server that has most of a prompt; of several, the one with least to do."""
        try:
            request: dict[str, Any] = json.loads(body)
            tokens = request.get("prompt")
            if not (isinstance(tokens, list) and all(isinstance(each, int) for each in tokens)):
                asked = {name: request[name] for name in OF_THE_PROMPT if name in request}
                with self.send(self.servers[-1], json.dumps(asked).encode(), "/tokenize") as answer:
                    tokens = json.loads(answer.read())["tokens"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            self.log_message("not read: %s: %s", type(error).__name__, error)
            tokens = []
        worth = [cache.worth(tokens) for cache in self.caches]
        return max(range(len(worth)), key=lambda at: (worth[at], -self.waiting[at]))

    def handed_over(self, body: bytes) -> bytes:
        """The request with what the server says that has computed its prompt; or as it came."""
        try:
            request: dict[str, Any] = json.loads(body)
            kept = {name: request[name] for name in request if name not in OF_THE_ANSWER}
            asked = kept | ONE_TOKEN | {"kv_transfer_params": {"do_remote_decode": True}}
            if self.path == PROMPTS[0]:
                del asked["max_completion_tokens"]
            with self.send(self.servers[0], json.dumps(asked).encode()) as answer:
                said = json.loads(answer.read())
            request["kv_transfer_params"] = said["kv_transfer_params"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            self.log_message("not computed ahead: %s: %s", type(error).__name__, error)
            return body
        return json.dumps(request).encode()

    def pass_on(self, body: bytes, to: int = -1) -> None:
        self.waiting[to] += 1
        try:
            self.pass_on_to(self.servers[to], body)
        finally:
            self.waiting[to] -= 1

    def pass_on_to(self, server: str, body: bytes) -> None:
        try:
            answer = self.send(server, body)
        except (OSError, http.client.HTTPException) as error:
            self.send_error(502, f"{server} does not answer ({error})")
            return
        with answer:  # as it comes, piece by piece: HTTP/1.0 ends with the connection
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", "text/plain"))
            self.end_headers()
            while piece := answer.read1():
                self.wfile.write(piece)

    def send(self, server: str, body: bytes, path: str = "") -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := self.headers["Authorization"]:
            headers["Authorization"] = key
        url = urlsplit(server)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=TIMEOUT_S)
        connection.request(self.command, path or self.path, body or None, headers)
        return connection.getresponse()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs="+", help="their addresses: http://127.0.0.1:8001")
    parser.add_argument("--events", nargs="+", default=[], help="where each one publishes events")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    if len(given.servers) != (len(given.events) or 2):
        parser.error("give as many --events as servers; or two servers, and no --events")
    Router.servers, Router.waiting = given.servers, [0] * len(given.servers)
    Router.caches = [Cached() for _ in given.events]
    for cache, endpoint in zip(Router.caches, given.events, strict=True):
        threading.Thread(target=cache.listen, args=(endpoint,), daemon=True).start()
    with ThreadingHTTPServer(("127.0.0.1", given.port), Router) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
