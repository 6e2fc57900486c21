"""The ceiling of a client measurement: a server that answers from memory and checks nothing.

GET /bucket/name/SIZE answers SIZE bytes, PUT takes whatever comes. A process of its own, so that
its work is never counted as the client's. `python benchmarks/tiers/static_server.py` prints its
port.
"""

from __future__ import annotations

import re
import socket
import threading

BODY_BYTES_MAX = 64 << 20
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_OK = b'HTTP/1.1 200 OK\r\nETag: "0123456789abcdef0123456789abcdef"\r\nContent-Length: %d\r\n\r\n'


def serve(connection: socket.socket, body: memoryview) -> None:
    """Answer the requests of one connection until the client closes it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = memoryview(bytearray(1 << 20))
    held = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in held:
                got = connection.recv(64 << 10)
                if not got:
                    return
                held += got
            head, _, held = held.partition(b"\r\n\r\n")
            method, target, _ = head.split(b" ", 2)
            if method == b"GET":
                size = int(target.split(b"?")[0].rpartition(b"/")[2])
                send(connection, [memoryview(_OK % size), body[:size]])
                continue
            found = _LENGTH.search(head)
            rest = (int(found.group(1)) if found else 0) - len(held)
            held = b""
            if b"100-continue" in head.lower():
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            while rest > 0:
                count = connection.recv_into(scratch, min(rest, len(scratch)), socket.MSG_WAITALL)
                if not count:
                    return
                rest -= count
            connection.sendall(_OK % 0)


def send(connection: socket.socket, buffers: list[memoryview]) -> None:
    """All of the buffers, in as few calls as it takes."""
    while buffers:
        count = connection.sendmsg(buffers)
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][count:]


def main() -> None:
    body = memoryview(bytearray(BODY_BYTES_MAX))
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection, body), daemon=True).start()


if __name__ == "__main__":
    main()
