"""How an S3 store gets there: TLS, addressing, credentials that come, go and are renewed."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from object_servers import HostileServer, Peer, ServerProcess, answer, error_body

from kvtier.backends.object import errors, signing
from kvtier.backends.object.open import StoreSettings, open_store
from kvtier.backends.object.s3 import S3Settings, S3Store
from kvtier.backends.object.store import GetOutcome
from kvtier.errors import ExtraMissing

pytestmark = pytest.mark.s3
BODY = b"bytes of an object"


def serve(peer: Peer, head: bytes) -> None:
    if not head.startswith(b"GET"):
        peer.read_body(head)
    peer.sendall(answer(200, BODY))


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer(serve) as server:
        yield server


Opener = Callable[..., S3Store]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens stores for a test and closes them behind it."""
    stores: list[S3Store] = []

    def open_one(**settings: Any) -> S3Store:
        stores.append(S3Store(S3Settings(bucket="bucket", **settings)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def get(store: S3Store) -> bytes:
    into = bytearray(len(BODY))
    assert store.get("name", [memoryview(into)]) is GetOutcome.FOUND
    return bytes(into)


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[HostileServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with HostileServer(serve, tls=context) as server:
        yield server


def test_tls_with_a_ca_bundle(opened: Opener, tls_server: HostileServer, certificate: Path) -> None:
    store = opened(
        endpoint=tls_server.endpoint.replace("http:", "https:"), ca_bundle=str(certificate)
    )
    for _ in range(2):
        assert get(store) == BODY
    store.put("name", [memoryview(b"head"), memoryview(bytes(3 << 20)), memoryview(b"tail")])


def test_an_unknown_authority_is_refused(opened: Opener, tls_server: HostileServer) -> None:
    store = opened(endpoint=tls_server.endpoint.replace("http:", "https:"))
    with pytest.raises(errors.TLSRefused, match="ca_bundle"):
        get(store)
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
    with pytest.raises(errors.TLSRefused, match="http://"):
        get(store)
    thread.join()
    plain.close()


def test_a_ca_bundle_that_cannot_be_read(tmp_path: Path) -> None:
    settings = S3Settings(
        bucket="bucket", endpoint="https://127.0.0.1:1", ca_bundle=str(tmp_path / "none.pem")
    )
    with pytest.raises(errors.TLSRefused, match=r"none\.pem"):
        S3Store(settings)


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
        store = open_store(
            StoreSettings(url="s3://bucket/a%20b", endpoint=endpoint, addressing=style)  # type: ignore[arg-type]
        )
        store.get("name", [memoryview(bytearray(len(BODY)))])
        server.heads.clear()
        store.get("name", [memoryview(bytearray(len(BODY)))])
        assert server.heads[0].startswith(f"GET {target} HTTP/1.1".encode())
        assert f"host: {host}\r\n".encode() in server.heads[0]
        store.close()


def test_an_ipv6_endpoint(opened: Opener) -> None:
    with HostileServer(serve, host="::1") as server:
        store = opened(endpoint=f"http://[::1]:{server.port}")
        assert get(store) == BODY
        with pytest.raises(errors.Unavailable):  # what this server says to a delete is no answer
            store.delete([f"n{index}" for index in range(9)])
    assert f"host: [::1]:{server.port}\r\n".encode() in server.heads[0]


def test_aws_itself_is_addressed_by_host() -> None:
    store = S3Store(S3Settings(bucket="my-bucket", region="eu-west-1"))
    assert "https://my-bucket.s3.eu-west-1.amazonaws.com:443" in repr(store)


def test_the_region_is_signed(opened: Opener, server: HostileServer) -> None:
    store = opened(endpoint=server.endpoint, region="eu-north-1")
    get(store)
    assert b"/eu-north-1/s3/aws4_request" in server.heads[0]


def test_credentials_may_come_after_the_start(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = opened(endpoint=server.endpoint)
    with pytest.raises(errors.NoCredentials, match="AWS_ACCESS_KEY_ID"):
        get(store)
    with pytest.raises(errors.NoCredentials):
        store.delete([f"n{index}" for index in range(9)])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "late")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "but here")
    assert get(store) == BODY


def test_a_profile_of_the_users_files(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text("[profile kv]\nregion = eu-north-1\n")
    keys.write_text("[kv]\naws_access_key_id = OFTHEPROFILE\naws_secret_access_key = SK\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    assert get(opened(endpoint=server.endpoint, profile="kv")) == BODY
    assert b"Credential=OFTHEPROFILE/" in server.heads[0]
    assert b"/eu-north-1/s3/" in server.heads[0]


def test_web_identity_gives_a_role(
    opened: Opener,
    server: HostileServer,
    moto_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As in a pod of Kubernetes: a token in a file, exchanged for keys that expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    token.write_text("token-of-the-pod")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto_server.endpoint)
    assert get(opened(endpoint=server.endpoint)) == BODY
    assert b"Credential=ASIA" in server.heads[0]
    assert b"x-amz-security-token: " in server.heads[0].lower()
    assert b"token-of-the-pod" not in server.heads[0]


def helped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, helper: str) -> None:
    """Credentials come from a program, in a profile of this name."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(f"[profile helped]\ncredential_process = {helper}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))


LONG_AGO = "2001-01-01T00:00:00Z"
EXPIRED = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "hidden", "Expiration": LONG_AGO}


@pytest.mark.parametrize("output", ["nonsense", "{}", json.dumps(EXPIRED)])
def test_a_helper_that_says_nonsense(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    (tmp_path / "said").write_text(output)
    helped(monkeypatch, tmp_path, f"cat {tmp_path}/said")
    store = opened(endpoint="http://127.0.0.1:1", profile="helped")
    with pytest.raises(errors.NoCredentials) as caught:
        get(store)
    assert "hidden" not in str(caught.value)


def test_a_helper_that_is_not_there(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helped(monkeypatch, tmp_path, f"{tmp_path}/nothing")
    with pytest.raises(errors.NoCredentials):
        get(opened(endpoint="http://127.0.0.1:1", profile="helped"))


@pytest.mark.parametrize("silent", [False, True])
def test_a_role_that_is_not_given(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: bool
) -> None:
    """No token file; or one, and a service that never answers: many ask, and none waits long."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(signing, "_READ_S", 0.2)
    monkeypatch.setattr(signing, "_ATTEMPTS", 1)
    token = tmp_path / "token"
    if silent:
        token.write_text("token-of-the-pod")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    with HostileServer(lambda peer, head: None) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.endpoint)
        store = opened(endpoint="http://127.0.0.1:1")

        def ask(_: int) -> str:
            with pytest.raises(errors.NoCredentials) as caught:
                get(store)
            return str(caught.value)

        with ThreadPoolExecutor(16) as many:
            said = set(many.map(ask, range(16)))
        assert len(service.heads) <= (4 if silent else 0)
    assert len(said) == 1
    assert "token-of" not in said.pop()


def test_an_unknown_profile_is_said_so(opened: Opener) -> None:
    with pytest.raises(errors.NoCredentials, match="profile"):
        opened(endpoint="http://127.0.0.1:1", profile="nobody")


def test_credentials_that_expire_are_refreshed_while_running(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A credential helper hands out tokens that are always about to expire."""
    counter = tmp_path / "count"
    helper = tmp_path / "helper.py"
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    said: dict[str, object] = {"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "SK"}
    said["Expiration"] = soon.isoformat()
    helper.write_text(
        "import json, pathlib\n"
        f"path = pathlib.Path({str(counter)!r})\n"
        "count = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(count))\n"
        f"said = {json.dumps(said)}\n"
        "print(json.dumps(said | {'SessionToken': f'token-{count}'}))\n"
    )
    helped(monkeypatch, tmp_path, f"{sys.executable} {helper}")
    store = opened(endpoint=server.endpoint, profile="helped")
    get(store)
    get(store)
    tokens = {
        line
        for head in server.heads
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"x-amz-security-token")
    }
    assert len(tokens) == 2


def test_an_expired_token_makes_the_chain_start_anew(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    monkeypatch.setattr(signing, "_RENEW_PAUSE_S", 0.0)

    def picky(peer: Peer, head: bytes) -> None:
        fresh = b"token: new" in head.lower()
        peer.sendall(answer(200, BODY) if fresh else answer(400, error_body("ExpiredToken")))

    server.script = picky
    store = opened(endpoint=server.endpoint)
    with pytest.raises(errors.ExpiredToken):
        get(store)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    assert get(store) == BODY


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
        open_store(StoreSettings(url=url))


@pytest.mark.parametrize(
    "endpoint",
    [
        "ftp://x",
        "127.0.0.1:9000",
        "http://user:hidden@host",
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
        open_store(StoreSettings(url="s3://bucket/x", endpoint=endpoint))
    assert "hidden" not in str(caught.value)


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.auth", None)
    with pytest.raises(ExtraMissing, match=r"kvtier\[s3\]"):
        open_store(StoreSettings(url="s3://bucket/x"))


def test_a_name_that_does_not_resolve(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    store = opened(endpoint="http://no-such-host.test")
    started = time.monotonic()
    with pytest.raises(errors.WrongEndpoint, match="endpoint"):
        get(store)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_is_none(opened: Opener, host: str) -> None:
    with pytest.raises(errors.WrongEndpoint, match="no host name"):
        get(opened(endpoint=f"http://{host}"))


def test_an_address_of_a_kind_that_this_machine_has_not(
    server: HostileServer, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo

    def both(host: str, port: int, **more: Any) -> list[Any]:
        return [(9999, socket.SOCK_STREAM, 0, "", ("there", port)), *known(host, port, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert get(opened(endpoint=server.endpoint)) == BODY
