"""Object servers for tests: real processes and a hostile one, on loopback with free ports."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import random
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import boto3

from kvtier.backends.object.stores.bucket_store import BucketStore

ACCESS_KEY = "AKIDKVTIERTEST"
SECRET_KEY = "secret-of-the-tests-0123456789"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The one account of azurite, which its documentation publishes."""
START_SECONDS_MAX = 60.0
Opener = Callable[..., BucketStore]
"""Opens a store with these settings: see the fixture `opened`."""

ENTRY = (
    "<Contents><Key>{key}</Key><LastModified>2026-11-20T10:00:00.250Z</LastModified>"
    "<Size>{size}</Size><ETag>x</ETag><Owner><ID>1</ID><Size>7</Size></Owner></Contents>"
)
"""An object in a page of a listing."""


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(") ")[2][0]


def free_port() -> int:
    """Any that is free: below those that connections take as their own end, so that no client of a
    test beside this one has it by the time that the server starts, or starts again."""
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first_of_clients, 11_000))
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


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
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any(_state(task) != "T" for task in tasks.iterdir()):
            time.sleep(0.001)  # a signal needs a moment

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

    def __exit__(self, *_: object) -> None:
        self.kill()


class AzureProcess(ServerProcess):
    """One whose endpoint names the account, too."""

    @property
    def endpoint(self) -> str:
        return f"{super().endpoint}/{AZURE_ACCOUNT}"


_MOTO = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
one_at_a_time, put = threading.Lock(), S3Response.put_object
def put_object(*args, **more):
    with one_at_a_time:
        return put(*args, **more)
S3Response.put_object = put_object
main()
"""
"""It looks whether an object is there, and writes it a moment later: two would win a race."""


def moto(folder: Path) -> ServerProcess:
    """The mock that knows conditional put; accepts every signature."""
    return ServerProcess(
        lambda port: [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)],
        folder / "moto.log",
    )


def rclone(folder: Path, program: Path | None = None, *options: str) -> ServerProcess:
    """A real server process that checks signatures; buckets are folders below `folder/data`."""
    data = folder / "data"
    (data / "bucket").mkdir(parents=True, exist_ok=True)
    program = program or Path(sys.executable).with_name("rclone")
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
            *options,
        ],
        folder / "rclone.log",
    )


def make_bucket(server: ServerProcess, bucket: str = "bucket") -> None:
    """Make a bucket on a mock; rclone's buckets are folders that `rclone` makes."""
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    client.close()


def azurite_program() -> str | None:
    """Microsoft's emulator of Azure's blobs, if it is installed: `npm install azurite`, beside the
    project or on the path."""
    beside = Path(__file__).parents[3] / "node_modules" / ".bin" / "azurite-blob"
    return str(beside) if beside.exists() else shutil.which("azurite-blob")


def azurite(folder: Path, program: str) -> ServerProcess:
    """A real server process that checks signatures and refuses a second writer."""
    options = ("--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence")
    return AzureProcess(
        lambda port: [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options],
        folder / "azurite.log",
    )


def make_container(server: ServerProcess, container: str = "bucket") -> None:
    """obstore makes no containers; this is the one request that does."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    signed = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
        f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{container}\nrestype:container"
    )
    digest = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256)
    said = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{server.endpoint}/{container}?restype=container",
        method="PUT",
        headers={"x-ms-date": date, "x-ms-version": version, "Authorization": said},
    )
    urllib.request.urlopen(request).close()


class Peer:
    """The hostile server's side of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._held = b""

    def recv(self, count: int) -> bytes:
        if self._held:
            found, self._held = self._held[:count], self._held[count:]
            return found
        return self._socket.recv(count)

    def read_head(self) -> bytes:
        """The next request's head, empty when the client has closed."""
        while b"\r\n\r\n" not in self._held:
            got = self._socket.recv(65536)
            if not got:
                return b""
            self._held += got
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        return head

    def read_body(self, head: bytes) -> bytes:
        """The body that belongs to this head."""
        body = b""
        found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        while len(body) < int(found.group(1) if found else 0):
            got = self.recv(65536)
            if not got:
                raise ConnectionResetError("the client closed inside a body")
            body += got
        return body

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(data)

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        with contextlib.suppress(OSError):  # closed by the other side a moment ago
            self._socket.shutdown(how)

    def reset(self) -> None:
        """Close at once, and say so: whatever is on its way is lost."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    @property
    def client(self) -> object:
        return self._socket.getpeername()


Script = Callable[[Peer, bytes], None]
"""What the hostile server does with a connection on which this request head has come in."""


class HostileServer:
    """Answers each request by a script, which may cut, trickle, lie or hang.

    `release` ends scripts that hang; closing the server sets it.
    """

    def __init__(
        self, script: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.script = script
        self._tls = tls
        self.heads: list[bytes] = []
        self.release = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._open: set[Peer] = set()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True)
                except OSError:
                    sock.close()  # the client does not trust us
                    continue
            peer = Peer(sock)
            self._open.add(peer)
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: Peer) -> None:
        try:
            while head := peer.read_head():
                self.heads.append(head)
                self.script(peer, head)
        except OSError:
            return  # the client gave up first, or the server was closed
        finally:
            peer.close()
            self._open.discard(peer)

    def close(self) -> None:
        self.release.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for peer in list(self._open):
            peer.cut()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pass_on(port: int, head: bytes, body: bytes) -> bytes:
    """What the server at this port answers to a request: for who stands before it."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head + b"\r\nconnection: close\r\n\r\n" + body)
        said = http.client.HTTPResponse(sock, method=head.partition(b" ")[0].decode())
        said.begin()
        content = said.read()
        fields = "".join(
            f"{name}: {value}\r\n"
            for name, value in said.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "content-length")
        )
        length = said.getheader("content-length", str(len(content)))
        return (
            f"HTTP/1.1 {said.status} {said.reason}\r\n{fields}content-length: {length}\r\n\r\n"
        ).encode() + content


def answer(status: int, body: bytes = b"", **fields: str) -> bytes:
    """A whole HTTP answer; field names are given with underscores."""
    if status == 200:
        fields = {"etag": '"e"'} | fields
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Said\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def error_body(code: str, message: str = "") -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    ).encode()


BODY = b"bytes of an object"


def serve_body(peer: Peer, head: bytes) -> None:
    """Take every PUT, and answer every GET with the same."""
    if not head.startswith(b"GET"):
        peer.read_body(head)
    peer.sendall(answer(200, BODY))


def get_body(store: BucketStore) -> bytes:
    """What a store gets from a server that does so."""
    into = bytearray(len(BODY))
    assert store.get("name", memoryview(into)) is not None
    return bytes(into)
