"""A small HTTP proxy, in a process of its own: tunnels (CONNECT), and carries requests on.

    python proxy_server.py [USER:PASSWORD]

Prints its port, then a line for each request: its first line.
"""

from __future__ import annotations

import base64
import re
import socket
import socketserver
import sys
import threading
from urllib.parse import urlsplit

WANTED = base64.b64encode(sys.argv[1].encode()) if len(sys.argv) > 1 else b""


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            got = self.request.recv(65536)
            if not got:
                return
            head += got
        print(head.partition(b"\r\n")[0].decode(), flush=True)
        found = re.search(rb"proxy-authorization: Basic (\S+)\r\n", head, re.IGNORECASE)
        if WANTED and (found is None or found.group(1) != WANTED):
            self.request.sendall(
                b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            return
        method, target, _ = head.split(b" ", 2)
        if method == b"CONNECT":
            host, _, port = target.decode().rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.request.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                self.pass_on(there)
            return
        parts = urlsplit(target.decode())
        with socket.create_connection((parts.hostname, parts.port or 80)) as there:
            there.sendall(head.replace(f"{parts.scheme}://{parts.netloc}".encode(), b"", 1))
            self.pass_on(there)

    def pass_on(self, there: socket.socket) -> None:
        """Bytes both ways until one side closes (of a kept connection the first request is
        shown)."""
        back = threading.Thread(target=copy, args=(there, self.request))
        back.start()
        copy(self.request, there)
        back.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other side has gone


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
