"""The mooncake tier keeps the contract of every tier, on a real master with real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.mooncake_pool import MooncakePool
from support.tiers.subjects import capacity

from kvtier.backends.mooncake import BACKEND, MooncakeSettings
from kvtier.testing.contract import TierContract
from kvtier.testing.subject import Subject


class MooncakeSubject(Subject):
    """The pool has more room than a tier keeps in mind, and remembers more than that."""

    backend = BACKEND

    def __init__(self, master: str) -> None:
        self._master = master

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> MooncakeSettings:
        return MooncakeSettings(master=self._master, capacity=capacity(blocks * record_bytes))


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    """One for all of the contract: each test finds it empty."""
    pool = MooncakePool(tmp_path_factory.mktemp("mooncake"))
    yield pool
    pool.close()


class TestMooncake(TierContract):
    @pytest.fixture
    def pool(self, shared_pool: MooncakePool) -> MooncakePool:
        shared_pool.empty()
        return shared_pool

    @pytest.fixture(autouse=True)
    def subject_in(self, pool: MooncakePool) -> None:
        type(self).subject = MooncakeSubject(pool.address)
