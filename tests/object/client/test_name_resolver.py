"""Names of hosts that do not resolve, and addresses that do not work."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from support.object.object_servers import (
    BODY,
    HostileServer,
    Opener,
    get_body,
)

from kvtier.backends.object.client.http import name_resolver as resolver
from kvtier.backends.object.client.http import sockets
from kvtier.backends.object.client.http.name_resolver import Resolver
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.open_store import open_store


def test_a_name_that_does_not_resolve(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    store = opened(endpoint="http://no-such-host.test")
    started = time.monotonic()
    with pytest.raises(errors.WrongEndpoint, match="endpoint"):
        get_body(store)
    assert time.monotonic() - started < 5


def test_name_servers_that_are_away_for_a_moment_are_weather(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, they may know; a restart of a cluster's own takes a second."""
    known, away = socket.getaddrinfo, [socket.EAI_AGAIN]

    def answers(*name: Any, **more: Any) -> list[Any]:
        if away:
            raise socket.gaierror(away.pop(), "Temporary failure in name resolution")
        return known(*name, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    store = open_store("s3://bucket/a", S3Settings(endpoint=server.endpoint))
    into = [memoryview(bytearray(len(BODY)))]
    assert store.get("name", into, deadline=time.monotonic() + 20.0) is not None
    store.close()


def test_name_servers_that_do_not_answer(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ends by its deadline all the same, and those that follow ask nobody once more."""
    known, answers, asked = socket.getaddrinfo, threading.Event(), threading.Semaphore(0)

    def silent(*name: Any, **more: Any) -> list[Any]:
        asked.release()
        answers.wait(20.0)
        return known(*name, **more)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    store = opened(endpoint=server.endpoint)
    for _ in range(2):
        with pytest.raises(errors.TimedOut, match="name server"):
            store.get("name", [memoryview(bytearray(len(BODY)))], deadline=time.monotonic() + 0.05)
    assert asked.acquire(blocking=False)
    assert not asked.acquire(blocking=False)
    answers.set()
    assert get_body(store) == BODY, "they answer again"


def test_where_no_thread_can_be_started_no_name_is_known_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver()
    with monkeypatch.context() as busy:
        busy.setattr(threading.Thread, "start", full)
        with pytest.raises(errors.Unavailable, match="nobody can ask"):
            resolver.resolve("127.0.0.1", 1, 10.0)
    assert resolver.resolve("127.0.0.1", 1, 10.0)[0][4] == ("127.0.0.1", 1)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_is_none(opened: Opener, host: str) -> None:
    with pytest.raises(errors.WrongEndpoint, match="no host name"):
        get_body(opened(endpoint=f"http://{host}"))


def test_an_address_of_a_kind_that_this_machine_has_not(
    server: HostileServer, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo

    def both(host: str, port: int, **more: Any) -> list[Any]:
        return [(9999, socket.SOCK_STREAM, 0, "", ("there", port)), *known(host, port, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert get_body(opened(endpoint=server.endpoint)) == BODY


def test_an_address_that_does_not_work_is_not_tried_first_for_each_connection(
    server: HostileServer, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several machines is off, or the way by IPv6 leads nowhere: that costs the time to
    connect."""
    known, tried = socket.getaddrinfo, list[tuple[str, int]]()

    class Socket(socket.socket):
        def connect(self, where: Any) -> None:
            if where[0] == "192.0.2.1":
                tried.append(where)
                raise TimeoutError
            super().connect(where)

    def both(host: str, port: int, **more: Any) -> list[Any]:
        (alive, *_) = known(host, port, **more)
        return [(*alive[:4], ("192.0.2.1", port)), alive]

    def get_anew() -> bytes:
        return get_body(opened(endpoint=server.endpoint))

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(sockets, "_resolver", Resolver())
    for _ in range(3):
        assert get_anew() == BODY
    assert len(tried) == 1
    monkeypatch.setattr(resolver, "_AVOID_S", 0.0)
    sockets._resolver.avoid(tried[0])
    assert get_anew() == BODY
    assert len(tried) == 2, "by and by it is"
