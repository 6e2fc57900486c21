"""How an S3 store gets there: TLS, addressing, names, regions."""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.object_servers import (
    BODY,
    HostileServer,
    Opener,
    Peer,
    ServerProcess,
    answer,
    get_body,
    serve_body,
)

from kvtier.backends.object.client.http.endpoint import Address, bucket_address
from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.open_store import open_store
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.errors import ExtraMissing

pytestmark = pytest.mark.s3


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[HostileServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with HostileServer(serve_body, tls=context) as server:
        yield server


def test_tls_with_a_ca_bundle(opened: Opener, tls_server: HostileServer, certificate: Path) -> None:
    store = opened(
        endpoint=tls_server.endpoint.replace("http:", "https:"), ca_bundle=str(certificate)
    )
    for _ in range(2):
        assert get_body(store) == BODY
    store.put("name", [memoryview(b"head"), memoryview(bytes(3 << 20)), memoryview(b"tail")])


def test_an_unknown_authority_is_refused(opened: Opener, tls_server: HostileServer) -> None:
    store = opened(endpoint=tls_server.endpoint.replace("http:", "https:"))
    with pytest.raises(errors.TLSRefused, match="ca_bundle"):
        get_body(store)
    with pytest.raises(errors.TLSRefused, match="ca_bundle"):
        list(store.list())


def test_https_to_a_plain_server_says_so(opened: Opener, server: HostileServer) -> None:
    server.script = lambda peer, head: peer.sendall(b"not TLS")
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


def test_path_and_virtual_host_addressing(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback = socket.getaddrinfo("127.0.0.1", server.port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    endpoint = f"http://s3.example.test:{server.port}"
    for style, host, target in (
        ("path", f"s3.example.test:{server.port}", "/bucket/a%20b/name"),
        ("virtual", f"bucket.s3.example.test:{server.port}", "/a%20b/name"),
    ):
        store = open_store("s3://bucket/a%20b", S3Settings(endpoint=endpoint, addressing=style))
        store.get("name", [memoryview(bytearray(len(BODY)))])
        server.heads.clear()
        store.get("name", [memoryview(bytearray(len(BODY)))])
        assert server.heads[0].startswith(f"GET {target} HTTP/1.1".encode())
        assert f"host: {host}\r\n".encode() in server.heads[0]
        store.close()


@pytest.mark.parametrize("endpoint", ["https://There/base", "http://there/base//"])
def test_an_endpoint_below_a_path(endpoint: str) -> None:
    tls = endpoint.startswith("https")
    there = Address("there", 443 if tls else 80, tls)
    assert bucket_address(endpoint, "bucket", "path") == (there, "/base/bucket/")
    below = there._replace(host="bucket.there")
    assert bucket_address(endpoint, "bucket", "virtual") == (below, "/base/")


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_not_asked_for_names_below_it(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, server.endpoint)
    store = open_store("s3://bucket/a")
    store.get("name", [memoryview(bytearray(len(BODY)))])
    assert server.heads[-1].startswith(b"GET /bucket/a/name HTTP/1.1")
    store.close()


@pytest.mark.parametrize("services", [False, True])
def test_nor_is_one_of_the_profile(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, services: bool
) -> None:
    named = f"endpoint_url = {server.endpoint}\n"
    text = f"[default]\nservices = here\n[services here]\ns3 =\n  {named}"
    config = tmp_path / "config"
    config.write_text(text if services else f"[default]\n{named}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = open_store("s3://bucket/a")
    store.get("name", [memoryview(bytearray(len(BODY)))])
    assert server.heads[-1].startswith(b"GET /bucket/a/name HTTP/1.1")
    store.close()


def test_bulk_deletes_are_signed_for_the_host_that_they_name(
    rclone_server: ServerProcess, opened: Opener
) -> None:
    """By a server that looks at signatures, at an endpoint with capital letters."""
    store = opened(endpoint=f"http://LocalHost:{rclone_server.port}", prefix="capitals")
    names = [f"n{index}" for index in range(9)]
    for name in names:
        store.put(name, [memoryview(b"x")])
    assert store.delete(names) == {}
    assert list(store.list()) == []


def test_an_ipv6_endpoint(opened: Opener) -> None:
    with HostileServer(serve_body, host="::1") as server:
        store = opened(endpoint=f"http://[::1]:{server.port}")
        assert get_body(store) == BODY
        store.delete([f"n{index}" for index in range(9)])  # in bulk, in vain, and singly
    host = f"host: [::1]:{server.port}\r\n".encode()
    assert [host in head for head in server.heads] == [True] * 11


def test_aws_itself_is_addressed_by_host() -> None:
    store = S3Store(S3Settings(bucket="my-bucket", region="eu-west-1"))
    assert "https://my-bucket.s3.eu-west-1.amazonaws.com:443" in repr(store)


def test_every_request_says_once_whose_it_is(opened: Opener, server: HostileServer) -> None:
    """Firewalls of clouds refuse those that do not (NoUserAgent_HEADER, say)."""
    plain = server.script

    def serve(peer: Peer, head: bytes) -> None:
        if head.startswith(b"POST"):
            peer.read_body(head)
            peer.sendall(answer(200, b"<DeleteResult/>"))
        elif b"list-type" in head:
            peer.sendall(answer(200, b"<ListBucketResult/>"))
        else:
            plain(peer, head)

    server.script = serve
    store = opened(endpoint=server.endpoint)
    store.put("name", [memoryview(b"x")])
    get_body(store)
    assert list(store.list()) == []
    store.delete([f"n{index}" for index in range(9)])
    methods = [head.partition(b" ")[0] for head in server.heads]
    assert methods == [b"PUT", b"GET", b"GET", b"POST"]
    assert [re.findall(rb"(?i)\nuser-agent: (\w+)/", head) for head in server.heads] == [
        [b"kvtier"]
    ] * 4


def test_the_region_is_signed(opened: Opener, server: HostileServer) -> None:
    store = opened(endpoint=server.endpoint, region="eu-north-1")
    get_body(store)
    assert b"/eu-north-1/s3/aws4_request" in server.heads[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://x/y",
        "s3://",
        "s3://user:pw@bucket/x",
        "s3://bucket/x?y",
        "s3://bucket/x#y",
        "s3://[x",
        "file://host/folder",
        "file:///folder%00",
        "folder",
        "file:",
        "",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(errors.WrongEndpoint):
        open_store(url)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ftp://x",
        "127.0.0.1:9000",
        "http://user:hidden@host",
        "http://:hidden@host",
        "http:///bucket",
        "http://host/#y",
        "",
        "http://host:99999",
        "http://host:http",
        "http://host:0",
        "http://[::1",
        "http://h\u00f6st",
        "http://host/?x=y",
    ],
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(errors.WrongEndpoint) as caught:
        open_store("s3://bucket/x", S3Settings(endpoint=endpoint))
    assert "hidden" not in str(caught.value)


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.auth", None)
    with pytest.raises(ExtraMissing, match=r"kvtier\[s3\]"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[bad", "http://host:port"])
def test_an_endpoint_of_the_environment_that_is_none(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(errors.WrongEndpoint):
        opened()


@pytest.mark.parametrize("region", ["eu west", "eu\r\nx: y", "a/b"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_a_region_that_is_none(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, region: str, from_environment: bool
) -> None:
    settings = {"endpoint": "http://127.0.0.1:1"}
    if from_environment:
        monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    else:
        settings["region"] = region
    with pytest.raises(errors.WrongRegion, match="is no region"):
        opened(**settings)
