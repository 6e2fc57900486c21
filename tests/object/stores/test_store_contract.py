"""The store contract against a folder, a mock, and real servers that can refuse and that cannot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.object_servers import Opener, ServerProcess
from support.object.s3_client_helpers import retrying_bucket
from support.object.store_contract import StoreContract

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
    def store(self, moto_server: ServerProcess, opened: Opener) -> Store:
        prefix = f"some+where %41&/ä{next(_numbers)}"
        return opened(prefix=prefix, endpoint=moto_server.endpoint)


@pytest.mark.s3
class TestRclone(StoreContract):
    can_refuse = False

    @pytest.fixture
    def store(self, rclone_server: ServerProcess, opened: Opener) -> Store:
        prefix = f"p {next(_numbers)}+ä%41&"
        return opened(prefix=prefix, endpoint=rclone_server.endpoint)


@pytest.mark.s3
class TestAzurite(StoreContract):
    @pytest.fixture
    def store(self, azurite_server: ServerProcess, opened: Opener) -> Store:
        prefix = f"some where/{next(_numbers)}"
        return opened(cloud="az", prefix=prefix, endpoint=azurite_server.endpoint)


@pytest.mark.s3
class TestGuardedMoto(StoreContract):
    """Retries and the breaker around it keep the contract too."""

    @pytest.fixture
    def store(self, moto_server: ServerProcess) -> Iterator[Store]:
        prefix = f"guarded/{next(_numbers)}"
        store = retrying_bucket(prefix=prefix, endpoint=moto_server.endpoint)
        yield store
        store.close()
