"""Media that are as slow as they are told to be: a way to a server, and the reads of a mover.

    python -m benchmarks.engine.slow PORT SECONDS BYTES_A_SECOND     # prints its own port

The way passes connections on to a port of this machine: so long for each request, and so many bytes
a second in all. A mover's interpreter imports `sitecustomize` when it starts: `throttle` writes one
that makes its reads slow.
"""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    command = [sys.executable, "-m", "benchmarks.engine.slow"]
    command += [str(port), str(seconds), str(bytes_a_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


_CUSTOM = """\
import sys
if "kvtier.move.process_main" in sys.orig_argv:
    sys.path.insert(0, {root!r})
    from benchmarks.engine.slow import begin
    begin({rate!r})
"""


def throttle(folder: Path, bytes_a_second: float) -> None:
    """Let the movers of engines that are started from now on read so many bytes a second."""
    root = str(Path(__file__).parents[2])
    (folder / "sitecustomize.py").write_text(_CUSTOM.format(root=root, rate=bytes_a_second))
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *known.split(os.pathsep)])


def begin(bytes_a_second: float) -> None:
    """Let all reads of this process together be no faster."""
    from kvtier.system.disk import Disk

    read, rate = Disk.readv, Rate(bytes_a_second)

    def later(*arguments: Any) -> int:
        done = read(*arguments)
        rate.take(done)
        return done

    Disk.readv = later  # type: ignore[assignment, method-assign]
    print(f"reads of {sys.argv[0]} are throttled", file=sys.stderr)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
