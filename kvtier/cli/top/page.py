"""The page of `kvtier top --page`: the same figures, for a browser on this machine.

The page is one file without anything from elsewhere; its policy lets the browser run its own script
and style alone, and ask nobody but this server, which tells figures and changes nothing.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

import msgspec

from kvtier.cli import console
from kvtier.cli.top.figures import ServerFigures, Watch
from kvtier.errors import ConfigError

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_PATIENCE_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Shown(msgspec.Struct):
    """What the page asks for again and again."""

    at: float
    every: float
    servers: Sequence[ServerFigures]


class PageServer(ThreadingHTTPServer):
    """Serves the page and the figures that were read last."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        self.page = (files(__package__) / "page.html").read_bytes()
        self.policy = _policy(self.page.decode())
        self.figures = b""
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            remedy = f"name another: --port {port + 1}"
            raise ConfigError(f"--port {port}", "another process uses it", remedy) from None

    def show(self, figures: Sequence[ServerFigures], every: float) -> None:
        """Tell these figures from now on."""
        self.figures = msgspec.json.encode(Shown(time.time(), every, figures))


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").partition(":")[0]
        if name not in _NAMES:  # a page of elsewhere whose name leads here
            self.send_error(421)
        elif self.path == "/":
            self._answer(self.server.page, "text/html; charset=utf-8")
        elif self.path == "/figures":
            self._answer(self.server.figures, "application/json")
        else:
            self.send_error(404)

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Length": str(len(body))}
        policy = {"Content-Security-Policy": self.server.policy}
        for header, value in {**headers, **policy, **_HEADERS}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _policy(page: str) -> str:
    """The content security policy under which this page runs, and nothing that got into it."""

    def own(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src '{own('script')}'; style-src '{own('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def serve_page(watch: Watch, every: float, port: int) -> None:
    """Serve the page until this process is told to end."""
    with PageServer(port) as server:
        server.show(watch.look(), every)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        console.say(f"kvtier: http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)")
        sys.stdout.flush()
        while True:
            time.sleep(every)
            server.show(watch.look(), every)
