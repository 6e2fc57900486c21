"""Through a real proxy process: tunnels, carried requests, exceptions, and its password."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import pytest
from support.object.object_servers import BODY, HostileServer, Opener, ServerProcess, get_body

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.store import PutOutcome

pytestmark = pytest.mark.s3
SECRET = "pass%40word-of-the-proxy"


class ProxyProcess:
    """A proxy that this test run started, and the first line of each request it got."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parents[2].joinpath("support", "object", "proxy_server.py")),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line.strip() for line in self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_requests_to_http_are_carried(
    moto_server: ServerProcess, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyProcess() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        store = opened(prefix="via", endpoint=moto_server.endpoint)
        names = [f"n{index}" for index in range(9)]
        for name in names:
            assert store.put(name, [memoryview(BODY)]) is PutOutcome.STORED
        into = bytearray(len(BODY))
        assert store.get("n1", memoryview(into)) == len(BODY)
        assert into == BODY
        assert [info.name for info in store.list()] == names
        assert store.delete(names) == {}
    assert proxy.lines[0] == f"PUT {moto_server.endpoint}/bucket/via/n0 HTTP/1.1"


def test_https_is_tunnelled(
    tls_server: HostileServer, opened: Opener, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyProcess() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")
        store = opened(endpoint=tls_server.endpoint, ca_bundle=str(certificate))
        assert get_body(store) == BODY
        store.put("name", [memoryview(bytes(3 << 20))])
    assert [*{*proxy.lines}] == [f"CONNECT 127.0.0.1:{tls_server.port} HTTP/1.1"]
    assert b"proxy" not in b"".join(tls_server.heads).lower()


@pytest.mark.parametrize("exception", ["127.0.0.1", "*", "other,127.0.0.1"])
def test_no_proxy_where_none_is_wanted(
    server: HostileServer, opened: Opener, monkeypatch: pytest.MonkeyPatch, exception: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", exception)
    assert get_body(opened(endpoint=server.endpoint)) == BODY


@pytest.mark.parametrize("tls", [False, True])
def test_a_proxy_with_a_password(
    server: HostileServer,
    tls_server: HostileServer,
    opened: Opener,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tls: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = tls_server.endpoint if tls else server.endpoint
    settings = {"endpoint": endpoint, "ca_bundle": str(certificate)}
    with ProxyProcess("user:pass@word-of-the-proxy") as proxy:
        place = f"127.0.0.1:{proxy.port}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://user:{SECRET}@{place}")
        store = opened(**settings)
        assert get_body(store) == BODY
        shown = repr(store)
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://user:wrong-password@{place}")
        with pytest.raises(errors.ProxyRefused, match=r"407.*correct user and password") as caught:
            get_body(opened(**settings))
    shown += caplog.text + str(caught.value)
    for secret in ("word-of-the-proxy", "wrong-password", "dXNlc"):
        assert secret not in shown


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("http://127.0.0.1:1", errors.Unavailable, r"proxy 127\.0\.0\.1:1: it is down"),
        ("http://no.such.invalid:1", errors.ProxyRefused, r"proxy no\.such\.invalid:1 .*: check"),
    ],
)
def test_a_proxy_that_is_not_there_is_named(
    server: HostileServer,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    kind: type[errors.StoreError],
    says: str,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", url)
    with pytest.raises(kind, match=says):
        get_body(opened(endpoint=server.endpoint))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("socks5://me:hidden@there:1", "not spoken to by socks5"),
        ("http://:1", "no host"),
        ("http://a:b", "cannot be read"),
        ("http://[a:1", "cannot be read"),
    ],
)
def test_what_is_no_proxy_is_said_so(
    server: HostileServer, opened: Opener, monkeypatch: pytest.MonkeyPatch, url: str, problem: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", url)
    with pytest.raises(errors.ProxyRefused, match=f"{problem}: write http://host:port") as caught:
        opened(endpoint=server.endpoint)
    assert "hidden" not in str(caught.value)
