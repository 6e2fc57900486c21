"""Object servers for tests: real processes and a hostile one, on loopback with free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import boto3

ACCESS_KEY = "AKIDKVTIERTEST"
SECRET_KEY = "secret-of-the-tests-0123456789"
START_SECONDS_MAX = 60.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """A server that this test run started; stopped by its process id, never by name."""

    def __init__(self, command: Callable[[int], Sequence[str]], log: Path) -> None:
        self._command = command
        self._log = log
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start (again, on the same port) and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(self.port), stdout=log, stderr=log)
        end = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"server ended at once: {self._log.read_text()[-2000:]}")
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.02)
        raise RuntimeError(f"server does not listen: {self._log.read_text()[-2000:]}")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def moto(folder: Path) -> ServerProcess:
    """The mock that knows conditional put; accepts every signature."""
    return ServerProcess(
        lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        folder / "moto.log",
    )


def rclone(folder: Path) -> ServerProcess:
    """A real server process that checks signatures; buckets are folders below `folder/data`."""
    data = folder / "data"
    (data / "bucket").mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("rclone")
    return ServerProcess(
        lambda port: [
            str(program),
            "serve",
            "s3",
            str(data),
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            f"{ACCESS_KEY},{SECRET_KEY}",
            "--vfs-cache-mode",
            "off",
            "--config",
            str(folder / "rclone.conf"),
        ],
        folder / "rclone.log",
    )


def make_bucket(server: ServerProcess, bucket: str = "bucket") -> None:
    """Make a bucket on a mock; rclone's buckets are folders that `rclone` makes."""
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    client.close()


Script = Callable[[socket.socket, bytes], None]
"""What the hostile server does with a connection on which this request head has come in."""


class HostileServer:
    """Answers each request by a script, which may cut, trickle, lie or hang.

    `release` ends scripts that hang; closing the server sets it.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.heads: list[bytes] = []
        self.release = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        held = b""
        try:
            while True:
                while b"\r\n\r\n" not in held:
                    got = connection.recv(65536)
                    if not got:
                        return
                    held += got
                head, _, held = held.partition(b"\r\n\r\n")
                self.heads.append(head)
                self.script(connection, head)
        except OSError:
            return  # the client gave up first, or the server was closed
        finally:
            connection.close()
            self._open.discard(connection)

    def close(self) -> None:
        self.release.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by its own thread a moment ago
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def answer(status: int, body: bytes = b"", **fields: str) -> bytes:
    """A whole HTTP answer; field names are given with underscores."""
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Said\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def error_body(code: str, message: str = "") -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    ).encode()
