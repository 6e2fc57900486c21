"""Fixtures: credentials for loopback servers, and the servers themselves."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object import object_servers
from support.object.certificates import make_certificate
from support.object.object_servers import HostileServer, Opener, ServerProcess, serve_body
from support.object.s3_client_helpers import PATIENT, store_at

from kvtier.backends.object import keeper as keeper_module
from kvtier.backends.object import lease as lease_module
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings

if not os.environ.get("KVTIER_TEST_ENDPOINT"):
    collect_ignore = ["stores/test_any_endpoint.py"]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own AWS set-up reaches a test."""
    for name in ("PROFILE", "SESSION_TOKEN", "ENDPOINT_URL", "ENDPOINT_URL_S3", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_servers.SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", object_servers.AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", object_servers.AZURE_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def server() -> Iterator[HostileServer]:
    """A server that does what a test's script says; without one it takes and answers all."""
    with HostileServer(serve_body) as server:
        yield server


@pytest.fixture
def store(server: HostileServer) -> Iterator[BucketStore]:
    """A patient client of it."""
    store = store_at(server)
    yield store
    store.close()


@pytest.fixture(scope="session")
def moto_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with object_servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def patient_openings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine may be late; then nothing would be stored at first."""
    monkeypatch.setattr(lease_module, "_WRITE_S", 60.0)
    monkeypatch.setattr(keeper_module, "_OPEN_S", 600.0)


@pytest.fixture
def moto_server(moto_process: ServerProcess, patient_openings: None) -> ServerProcess:
    """The mock, with a bucket named "bucket"; what one test leaves there the next may find."""
    object_servers.make_bucket(moto_process)
    return moto_process


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with object_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def brief_settling(monkeypatch: pytest.MonkeyPatch, patient_openings: None) -> None:
    """In a store without conditional puts each opening waits for servers that may be late; a test
    that opens hundreds has none."""
    monkeypatch.setattr(lease_module, "_SETTLE_S", 0.1)


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a container named "bucket"; skips where it is not installed."""
    program = object_servers.azurite_program()
    if program is None:
        pytest.skip("azurite is not installed: npm install azurite@3.37.0 in the project's folder")
    with object_servers.azurite(tmp_path_factory.mktemp("azurite"), program) as server:
        object_servers.make_container(server)
        yield server


@pytest.fixture
def own_rclone(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this test's own, to stop and to kill."""
    with object_servers.rclone(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1, valid today, trusted by nobody."""
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def tls_server(context: ssl.SSLContext) -> Iterator[HostileServer]:
    """As `server`, by TLS."""
    with HostileServer(serve_body, tls=context) as server:
        yield server


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens stores for a test and closes them behind it; they wait for servers on busy machines."""
    stores: list[BucketStore] = []

    def open_one(**settings: Any) -> BucketStore:
        settings = {"bucket": "bucket", "timeouts": PATIENT} | settings
        stores.append(BucketStore(BucketSettings(**settings)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
