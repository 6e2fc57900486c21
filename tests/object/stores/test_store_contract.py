"""The store contract against a folder, a mock that can refuse and a real server that cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.object_servers import ServerProcess
from support.object.store_contract import StoreContract

from kvtier.backends.object.client.s3_settings import S3Settings
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.open_store import open_store
from kvtier.backends.object.stores.s3_store import S3Store
from kvtier.backends.object.stores.store import Store

_numbers = itertools.count()


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "store")


@pytest.mark.s3
class TestMoto(StoreContract):
    @pytest.fixture
    def store(self, moto_server: ServerProcess) -> Iterator[Store]:
        prefix = f"some+where %41&/ä{next(_numbers)}"
        store = S3Store(S3Settings(bucket="bucket", prefix=prefix, endpoint=moto_server.endpoint))
        yield store
        store.close()


@pytest.mark.s3
class TestRclone(StoreContract):
    can_refuse = False

    @pytest.fixture
    def store(self, rclone_server: ServerProcess) -> Iterator[Store]:
        prefix = f"p {next(_numbers)}+ä%41&"
        store = S3Store(S3Settings(bucket="bucket", prefix=prefix, endpoint=rclone_server.endpoint))
        yield store
        store.close()


@pytest.mark.s3
class TestGuardedMoto(StoreContract):
    """Retries and the breaker around it keep the contract too."""

    @pytest.fixture
    def store(self, moto_server: ServerProcess) -> Iterator[Store]:
        url = f"s3://bucket/guarded/{next(_numbers)}"
        store = open_store(url, S3Settings(endpoint=moto_server.endpoint))
        yield store
        store.close()
