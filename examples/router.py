"""Let one server compute prompts and another answer them, by way of a folder that both have.

python examples/router.py http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000

The first server computes each prompt and stores its blocks, the second finds them and goes on. So
long prompts hold up nobody's answer. Whatever the first one does, the second one answers. This is
the least that there can be; any router that speaks of vLLM's `do_remote_decode` will do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600
PROMPTS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
OF_THE_ANSWER = ("min_tokens", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs")


class Router(BaseHTTPRequestHandler):
    """Answers for the second server."""

    computes: str
    goes_on: str

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
        self.pass_on(self.handed_over(body) if self.path in PROMPTS else body)

    def chunks(self) -> Iterator[bytes]:
        """A body whose length nobody said, to its end."""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def handed_over(self, body: bytes) -> bytes:
        """The request with what the server says that has computed its prompt; or as it came."""
        try:
            request: dict[str, Any] = json.loads(body)
            kept = {name: request[name] for name in request if name not in OF_THE_ANSWER}
            asked = kept | ONE_TOKEN | {"kv_transfer_params": {"do_remote_decode": True}}
            if self.path == PROMPTS[0]:
                del asked["max_completion_tokens"]
            with self.send(self.computes, json.dumps(asked).encode()) as answer:
                said = json.loads(answer.read())
            request["kv_transfer_params"] = said["kv_transfer_params"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            self.log_message("not computed ahead: %s: %s", type(error).__name__, error)
            return body
        return json.dumps(request).encode()

    def pass_on(self, body: bytes) -> None:
        try:
            answer = self.send(self.goes_on, body)
        except (OSError, http.client.HTTPException) as error:
            self.send_error(502, f"{self.goes_on} does not answer ({error})")
            return
        with answer:  # as it comes, piece by piece: HTTP/1.0 ends with the connection
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", "text/plain"))
            self.end_headers()
            while piece := answer.read1():
                self.wfile.write(piece)

    def send(self, server: str, body: bytes) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := self.headers["Authorization"]:
            headers["Authorization"] = key
        url = urlsplit(server)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=TIMEOUT_S)
        connection.request(self.command, self.path, body or None, headers)
        return connection.getresponse()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("computes", help="the server that computes prompts")
    parser.add_argument("goes_on", help="the server that answers them")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    Router.computes, Router.goes_on = given.computes, given.goes_on
    with ThreadingHTTPServer(("127.0.0.1", given.port), Router) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
