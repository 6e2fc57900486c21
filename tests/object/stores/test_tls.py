"""What goes wrong on a TLS connection: weather, or something to put right."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object.certificates import make_certificate
from support.object.object_servers import BODY, HostileServer, Opener, Peer, get_body

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.clouds import Timeouts

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("by", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "profile"])
def test_the_authorities_that_other_tools_trust_there(
    tls_server: HostileServer,
    opened: Opener,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    by: str,
) -> None:
    if by != "profile":
        monkeypatch.setenv(by, str(certificate))
    else:
        config = tmp_path / "config"
        config.write_text(f"[default]\nca_bundle = {certificate}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    assert get_body(opened(endpoint=tls_server.endpoint)) == BODY


def test_what_names_authorities_for_stores_alone_goes_first(
    tls_server: HostileServer, opened: Opener, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/authorities.pem")
    assert get_body(opened(endpoint=tls_server.endpoint)) == BODY


def test_the_authorities_of_a_file_that_is_not_there(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/authorities.pem")
    with pytest.raises(errors.TLSRefused, match="/nowhere/authorities"):
        opened(endpoint="https://127.0.0.1:1")


Lone = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def lone() -> Iterator[Lone]:
    """Serves one connection, before TLS is spoken on it; the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []

        def serve(talk: Callable[[socket.socket], None]) -> str:
            def accept() -> None:
                with listener.accept()[0] as sock:
                    talk(sock)

            threads.append(threading.Thread(target=accept))
            threads[0].start()
            return f"https://127.0.0.1:{listener.getsockname()[1]}"

        yield serve
        threads[0].join()


def until_closed(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def test_a_server_that_goes_away_amid_the_greeting_is_weather(lone: Lone, opened: Opener) -> None:
    store = opened(endpoint=lone(lambda sock: (sock.recv(1 << 16), None)[1]))
    with pytest.raises(errors.Unavailable, match="broke") as caught:
        get_body(store)
    assert type(caught.value) is errors.Unavailable


def test_a_server_that_does_not_greet(lone: Lone, opened: Opener) -> None:
    short = Timeouts(connect_s=10.0, idle_s=0.1, total_s=10.0)
    store = opened(endpoint=lone(until_closed), timeouts=short)
    with pytest.raises(errors.TimedOut, match="does not answer"):
        get_body(store)


@pytest.mark.parametrize("upload", [False, True])
def test_a_server_that_falls_silent_behind_the_greeting(
    tls_server: HostileServer, opened: Opener, certificate: Path, upload: bool
) -> None:
    def hang(peer: Peer, head: bytes) -> None:
        tls_server.release.wait()

    tls_server.script = hang
    store = opened(
        endpoint=tls_server.endpoint,
        ca_bundle=str(certificate),
        timeouts=Timeouts(connect_s=10.0, idle_s=5.0, total_s=0.5),
    )
    long = memoryview(bytearray(64 << 20))
    with pytest.raises(errors.TimedOut):
        store.put("name", [long]) if upload else store.get("name", long)


def test_a_server_that_wants_to_know_who_asks(
    lone: Lone, context: ssl.SSLContext, certificate: Path, opened: Opener
) -> None:
    """It says so when the greeting is over, in answer to the first request."""
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)

    def refuse(sock: socket.socket) -> None:
        talking = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with talking, contextlib.suppress(OSError):
            with pytest.raises(ssl.SSLError):
                talking.do_handshake()
            while os.read(talking.fileno(), 1 << 16):
                pass  # until it is heard

    store = opened(endpoint=lone(refuse), ca_bundle=str(certificate))
    with pytest.raises(errors.TLSRefused, match="refuses TLS"):
        get_body(store)


@pytest.mark.parametrize(
    ("made", "setting", "remedy"),
    [
        ({"host": "127.0.0.2"}, "endpoint", "addressing: path"),
        ({"day": -3}, "clock", "renewed"),
        ({"day": 3}, "clock", "clock of this machine"),
    ],
)
def test_a_certificate_whose_authority_is_known_is_not_said_to_lack_it(
    tls_server: HostileServer,
    context: ssl.SSLContext,
    opened: Opener,
    tmp_path: Path,
    made: dict[str, Any],
    setting: str,
    remedy: str,
) -> None:
    bundle = make_certificate(tmp_path / "made.pem", **made)
    context.load_cert_chain(bundle)
    with pytest.raises(errors.TLSRefused, match=remedy) as caught:
        get_body(opened(endpoint=tls_server.endpoint, ca_bundle=str(bundle)))
    assert caught.value.setting == setting
    assert "ca_bundle" not in str(caught.value)


def test_an_authority_that_follows_another_is_believed_without_a_restart(
    tls_server: HostileServer, certificate: Path, opened: Opener, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path / "other.pem", "another")
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(other.read_text())
    store = opened(endpoint=tls_server.endpoint, ca_bundle=str(bundle))
    for text in (other.read_text(), "just being written"):
        bundle.write_text(text)
        with pytest.raises(errors.TLSRefused):
            get_body(store)
    bundle.write_text(other.read_text() + certificate.read_text())
    assert get_body(store) == BODY


def test_a_certificate_of_an_authority_itself_is_refused_with_the_remedy(
    context: ssl.SSLContext, opened: Opener, tls_server: HostileServer, tmp_path: Path
) -> None:
    """rustls takes none, where OpenSSL would."""
    bundle = make_certificate(tmp_path / "made.pem", authority=True)
    context.load_cert_chain(bundle)
    with pytest.raises(errors.TLSRefused, match="CA:FALSE"):
        get_body(opened(endpoint=tls_server.endpoint, ca_bundle=str(bundle)))


def test_an_unknown_authority_is_refused(opened: Opener, tls_server: HostileServer) -> None:
    store = opened(endpoint=tls_server.endpoint)
    with pytest.raises(errors.TLSRefused, match="ca_bundle"):
        get_body(store)
    with pytest.raises(errors.TLSRefused, match="ca_bundle"):
        list(store.list())


def test_https_to_a_plain_server_says_so(opened: Opener) -> None:
    plain = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        peer, _ = plain.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=talk)
    thread.start()
    store = opened(endpoint=f"https://127.0.0.1:{plain.getsockname()[1]}")
    with pytest.raises(errors.TLSRefused, match="http://") as caught:
        get_body(store)
    assert caught.value.setting == "endpoint"
    thread.join()
    plain.close()
