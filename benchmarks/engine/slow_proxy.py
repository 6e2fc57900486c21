"""A way to a server that takes time: so long for each request, and so many bytes a second in all.

    python -m benchmarks.engine.slow_proxy PORT SECONDS BYTES_A_SECOND     # prints its own port

It passes connections on to a port of this machine.
"""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE_BYTES = 1 << 16


class Rate:
    """Bytes a second that all connections share."""

    def __init__(self, bytes_a_second: float) -> None:
        self._each = 1 / bytes_a_second
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until so many bytes have had their time."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - 0.01) + size * self._each
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


def serve(port: int, seconds: float, bytes_a_second: float) -> None:
    """Pass connections on until the process is ended."""
    rate = Rate(bytes_a_second)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=self.answer, args=(server,), daemon=True)
                back.start()
                while data := self.request.recv(_PIECE_BYTES):
                    time.sleep(seconds)
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)
                back.join()

        def answer(self, server: socket.socket) -> None:
            try:
                while data := server.recv(_PIECE_BYTES):
                    rate.take(len(data))
                    self.request.sendall(data)
            except OSError:
                return  # the client has gone

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no news."""

    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


@contextmanager
def slow_proxy(port: int, seconds: float, bytes_a_second: float) -> Iterator[int]:
    """The port of such a way to another port, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.slow_proxy"]
    command += [str(port), str(seconds), str(bytes_a_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
