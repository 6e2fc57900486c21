"""A pool of Mooncake Store on loopback: its master, and clients that lend memory to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from support.object.object_servers import free_port

PATIENCE_S = 60.0
SEGMENT = 256 << 20


def until(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def tool(name: str) -> str | None:
    """A program of Mooncake's wheel."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


class MooncakePool:
    """Processes that are killed by their ids, and started again on the same ports."""

    def __init__(self, folder: Path, lent: int = SEGMENT) -> None:
        self._log = folder / "mooncake.log"
        self._lent = lent
        self._port, metrics = free_port(), free_port()
        self.metrics = f"127.0.0.1:{metrics}"
        self.address = f"127.0.0.1:{self._port}"
        self.master = self._start_master()
        try:
            self.start_owner()
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        program = tool(name)
        assert program is not None
        with self._log.open("ab") as out:
            environment = os.environ | {"MC_LOG_LEVEL": "INFO"}
            return subprocess.Popen(
                [program, *flags], stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def _start_master(self) -> subprocess.Popen[bytes]:
        process = self._start(
            "mooncake_master",
            f"--rpc_port={self._port}",
            f"--metrics_port={self.metrics.rpartition(':')[2]}",
            "--rpc_address=127.0.0.1",
            "--enable_metric_reporting=false",
        )
        until(lambda: self.asks("/health") is not None)
        return process

    def start_owner(self, lent: int | None = None) -> None:
        """A client that does nothing but lend memory."""
        port = free_port()
        self.owner = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--global_segment_size={lent or self._lent}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
        )
        serves = f"Starting real client service on 127.0.0.1:{port}"  # after it has lent
        until(lambda: serves in self._log.read_text(errors="replace"))

    def asks(self, path: str) -> str | None:
        """What the master says; None while it says nothing."""
        try:
            url = f"http://{self.metrics}{path}"
            with urllib.request.urlopen(url, timeout=5) as said:
                found: bytes = said.read()
                return found.decode()
        except OSError:
            return None

    def kill_owner(self) -> None:
        end(self.owner)

    def kill_master(self) -> None:
        end(self.master)

    def restart_master(self) -> None:
        """A new one, which knows nothing of old values."""
        self.master = self._start_master()

    def close(self) -> None:
        for process in (self.owner, self.master):
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, also if it was stopped."""
    process.send_signal(signal.SIGKILL)
    process.wait()


class StallingProxy:
    """Carries bytes between the clients of a port and a server, until it is told to stall."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._flows = threading.Event()
        self._flows.set()
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # as if it were the server itself
                client.close()
                continue
            self._links += [client, server]
            for way in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, asked: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.hold(data, asked=asked)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def hold(self, data: bytes, *, asked: bool) -> None:
        """Wait until these bytes may go on, which a client has `asked`, or the server answers."""
        self._flows.wait()

    def close(self) -> None:
        self.flow()
        for each in [self._listener, *self._links]:
            each.close()
