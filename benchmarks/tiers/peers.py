"""What kvtier's NVMe tier is measured beside: vLLM's own file tier, and bare system calls."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

CopyOn = Callable[[Sequence[memoryview]], object]
"""Copies blocks that have been read to where an engine wants them."""


class BareSlab:
    """Aligned slots in one preallocated file, one preadv or pwritev a block, on eight threads."""

    name = "bare"

    def __init__(
        self,
        folder: Path,
        memory: memoryview,
        block: int,
        count: int,
        copy: CopyOn = len,
    ) -> None:
        self._views = [memory[i * block : (i + 1) * block] for i in range(count)]
        self._copy = copy
        self._block = block
        self._slots = 2 * count
        self._next = 0
        self._pool = ThreadPoolExecutor(8)
        path = folder / "bare.slab"
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._slots * block)

    def store(self, jobs: int) -> None:
        """Write all blocks to fresh slots; how they are split into jobs makes no difference."""
        self._base = self._next
        self._next = (self._base + len(self._views)) % self._slots
        self._each(os.pwritev)

    def load(self, jobs: int) -> None:
        """Read them back."""
        self._each(os.preadv)

    def _each(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        base, block = self._base, self._block
        done = self._pool.map(
            lambda i: call(self._fd, [self._views[i]], (base + i) * block), range(len(self._views))
        )
        assert all(count == block for count in done)

    def to_pages(self, jobs: int) -> None:
        """Read them back and copy them to where an engine wants them."""
        self.load(jobs)
        self._copy(self._views)

    def forget(self) -> None:
        """Slots are used again; nothing is left behind."""

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


class VllmFiles:
    """vLLM's FileSystemTierManager, as its own tiering manager would call it."""

    name = "vllm"

    def __init__(
        self, folder: Path, memory: memoryview, block: int, count: int, copy: CopyOn
    ) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._root = folder / "vllm"
        view = memory[: block * count].cast("B", (count, block))
        self._tier = FileSystemTierManager(_spec(), view, tier_type="fs", root_dir=str(self._root))
        self._payloads = [memory[i * block : (i + 1) * block] for i in range(count)]
        self._copy = copy
        self._count = count
        self._round = 0
        self._job = 0
        self._chunks = np.arange(count)

    def _keys(self) -> list[bytes]:
        """New keys every round, in the same folders: a cache in use has them already."""
        return [
            hashlib.sha256(str(i).encode()).digest()[:4]
            + hashlib.sha256(f"{self._round}/{i}".encode()).digest()[:28]
            + bytes(4)
            for i in range(self._count)
        ]

    def _jobs(self, jobs: int, *, promotion: bool) -> Sequence[Any]:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        keys, size = self._keys(), self._count // jobs
        made = []
        for start in range(0, self._count, size):
            self._job += 1
            part = slice(start, start + size)
            context = ReqContext(req_id=str(self._job))
            made.append(TransferJob(self._job, keys[part], self._chunks[part], promotion, context))
        return made

    def store(self, jobs: int) -> None:
        """Every block to a file of its own, under keys that are new."""
        self._round += 1
        for job in self._jobs(jobs, promotion=False):
            self._tier.submit_store(job)
        self._finish(jobs)

    def load(self, jobs: int) -> None:
        """Read them back."""
        for job in self._jobs(jobs, promotion=True):
            self._tier.submit_load(job)
        self._finish(jobs)

    def to_pages(self, jobs: int) -> None:
        """Read them back and copy them to where an engine wants them."""
        self.load(jobs)
        self._copy(self._payloads)

    def _finish(self, jobs: int) -> None:
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        assert len(results) == jobs
        assert all(result.success for result in results)

    def forget(self) -> None:
        """Remove the files: this tier never does."""
        for path in self._root.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        self._tier.shutdown()


def _spec() -> Any:
    """As much of an offloading spec as the file tier reads."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=128, layer_names=["0"])],
        parallel=parallel,
        canonical_layout=False,
        kv_cache_layout=None,
        model=SimpleNamespace(name="benchmark", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=128),
        replicated_layout=False,
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )


def shared_memory(size: int) -> mmap.mmap:
    """Shared memory on tmpfs, like an engine's CPU tier."""
    path = Path(f"/dev/shm/kvtier-benchmark-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
        path.unlink()
