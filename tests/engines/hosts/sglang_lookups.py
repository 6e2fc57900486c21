"""Asks kvtier's storage and SGLang's own, which keeps files, for the same pages of several pools.
Ends with an error where they do not say the same.

python sglang_lookups.py FOLDER
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvtier.sglang.storage import KVTierStorage

KEYS = [bytes([number] * 32).hex() for number in range(9)]
ASKED = (
    PoolTransfer(PoolName.MAMBA, keys=["?"], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    PoolTransfer(PoolName.SWA, keys=["?"] * 3, hit_policy=PoolHitPolicy.TRAILING_PAGES),
    PoolTransfer(PoolName.DRAFT_SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES),
    PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
)
CASES = 500


class Held:
    """The store of kvtier's storage, and the keys of its pages: it holds these."""

    def __init__(self, held: Iterable[tuple[str, str]]) -> None:
        self._held = set(held)
        self.pages = self

    def keys(self, pool: str, hashes: list[bytes]) -> list[tuple[str, str]]:
        return [(pool, each.hex()) for each in hashes]

    def find(self, *asked: list[tuple[str, str]]) -> list[list[bool]]:
        return [[page in self._held for page in pages] for pages in asked]


def main(folder: Path) -> None:
    chance = random.Random(0)
    files = HiCacheFile(HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, ""), folder)
    ours: Any = KVTierStorage.__new__(KVTierStorage)
    answers = set()
    for _ in range(CASES):
        files.clear()
        likely = chance.choice([0.5, 0.9, 0.97])
        pools = [PoolName.KV, *(each.name for each in ASKED)]
        pages = [(pool, key) for pool in pools for key in KEYS if chance.random() < likely]
        for pool, key in pages:
            (folder / f"{files._get_component_key(key, pool)}.bin").touch()
        ours._store = Held(pages)
        transfers = chance.sample(ASKED, chance.randrange(len(ASKED) + 1))
        keys = KEYS[: chance.randrange(len(KEYS) + 1)]
        right, found = (each.batch_exists_v2(keys, transfers) for each in (files, ours))
        assert right == found, (pages, transfers, keys, right, found)
        answers.add(found.kv_hit_pages)
    assert len(answers) > len(KEYS) // 2, "and they say something"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
