"""The store contract against a folder, a mock, and real servers that can refuse and that cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.object_servers import ServerProcess
from support.object.s3_client_helpers import retrying_bucket
from support.object.store_contract import StoreContract

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings
from kvtier.backends.object.stores.file_store import FileStore
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
        store = BucketStore(
            BucketSettings(bucket="bucket", prefix=prefix, endpoint=moto_server.endpoint)
        )
        yield store
        store.close()


@pytest.mark.s3
class TestRclone(StoreContract):
    can_refuse = False

    @pytest.fixture
    def store(self, rclone_server: ServerProcess) -> Iterator[Store]:
        prefix = f"p {next(_numbers)}+ä%41&"
        store = BucketStore(
            BucketSettings(bucket="bucket", prefix=prefix, endpoint=rclone_server.endpoint)
        )
        yield store
        store.close()


@pytest.mark.s3
class TestAzurite(StoreContract):
    @pytest.fixture
    def store(self, azurite_server: ServerProcess) -> Iterator[Store]:
        settings = BucketSettings(
            cloud="az",
            bucket="bucket",
            prefix=f"some where/{next(_numbers)}",
            endpoint=azurite_server.endpoint,
        )
        store = BucketStore(settings)
        yield store
        store.close()


@pytest.mark.s3
class TestGuardedMoto(StoreContract):
    """Retries and the breaker around it keep the contract too."""

    @pytest.fixture
    def store(self, moto_server: ServerProcess) -> Iterator[Store]:
        prefix = f"guarded/{next(_numbers)}"
        store = retrying_bucket(prefix=prefix, endpoint=moto_server.endpoint)
        yield store
        store.close()
