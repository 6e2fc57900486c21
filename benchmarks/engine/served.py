"""Engines on a model of the benchmarks' own, in folders that go with them."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engines.engine
from engines.engine import Engine

from kvtier.testing.subject import make_memory_folder
from kvtier.vllm import tiny_model

if TYPE_CHECKING:
    from support.object.object_servers import ServerProcess

HOST = Path(engines.engine.__file__).with_name("hosts") / "stopwatch.py"
CPU_INFO = Path("/proc/cpuinfo")
DTYPE = os.environ.get("DTYPE") or (
    "float32" if CPU_INFO.exists() and "_bf16" not in CPU_INFO.read_text() else "bfloat16"
)
"""Without instructions for bfloat16, matrices of float32 are multiplied many times as fast."""
ITEM_BYTES = 4 if DTYPE == "float32" else 2


class Served:
    """A model with random weights, prompts for it, and engines that serve it."""

    def __init__(self, folder: Path, region: Path, layers: int, hidden: int) -> None:
        self.folder = folder
        self.region = region
        self.blocks = folder / "blocks"
        name = f"bench-{layers}-{hidden}"
        self.token_bytes = layers * hidden * ITEM_BYTES
        """Of KV cache: keys and values of half as many heads as the model has."""
        self.model = tiny_model.build(Path(sys.prefix) / "models" / name, "llama", layers, hidden)
        self._seed = 0

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        self._seed += 1
        return random.Random(self._seed).choices(range(256), k=tokens)

    def cpu(self, capacity: int | str, **more: Any) -> dict[str, Any]:
        """CPU memory as a tier."""
        return {"kind": "cpu", "path": str(self.region), "capacity": capacity, **more}

    def nvme(self, capacity: int | str) -> dict[str, Any]:
        """The disk as a tier."""
        return {"kind": "nvme", "path": str(self.blocks), "capacity": capacity}

    @staticmethod
    def stack(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A stack of these."""
        return {"version": 1, "name": "bench", "tiers": list(tiers), **more}

    def start(
        self, stack: Mapping[str, Any] | None, tokens: int, host: Path = HOST, **more: Any
    ) -> Engine:
        """An engine for prompts of so many tokens."""
        return Engine(
            self.folder / "engine.log",
            host=host,
            stack=stack,
            # As `kvtier serve` does it: a core is left for what runs beside the engine.
            environment={"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1))},
            model=str(self.model),
            dtype=DTYPE,
            max_model_len=tokens + 64,
            max_num_batched_tokens=2048,
            **more,
        )


def own_cache(blocks: int, block_tokens: int) -> dict[str, Any]:
    """So large an engine's own cache; as bytes the environment's VLLM_CPU_KVCACHE_SPACE would go
    before it."""
    return {"num_gpu_blocks_override": blocks, "block_size": block_tokens}


def bucket_server(folder: Path) -> ServerProcess:
    """An S3 server with its bucket in this folder; engines find its keys in the environment."""
    from support.object.object_servers import ACCESS_KEY, SECRET_KEY, rclone  # which needs boto3

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    return rclone(folder, Path(sys.prefix).with_name(".venv") / "bin/rclone")


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """One on a disk (`FOLDER` says where), and one in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=os.environ.get("FOLDER")))
    region = make_memory_folder("bench")
    try:
        yield folder, region
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(region, ignore_errors=True)
