"""A test's folders, the stacks in them, and the engines on these."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engines.engine import Engine
from kvtier.testing.subject import make_memory_folder


class World:
    """Folders of one test, and stacks in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.region = make_memory_folder()
        self.blocks = folder / "blocks"
        self._engines: list[Engine] = []

    def stack(self, *, capacity: str = "64MiB", **more: Any) -> dict[str, Any]:
        """CPU and NVMe, which may be slow on a busy machine; `more` is given to the NVMe tier."""
        more = {"load_deadline": "2min"} | more
        nvme = {"kind": "nvme", "path": str(self.blocks), "capacity": "512MiB", "free_floor": 0}
        cpu = {"kind": "cpu", "path": str(self.region), "capacity": capacity}
        cpu["load_deadline"] = more["load_deadline"]
        return {
            "version": 1,
            "name": "test",
            "load_policy": "always",
            "prefetch": {"warmup_share": 0},
            "tiers": [cpu, nvme | more],
        }

    def stack_across_degrees(self, **more: Any) -> dict[str, Any]:
        """CPU memory, NVMe, and a store in a folder, for engines of any tensor-parallel size."""
        bucket = self.folder / "bucket"
        bucket.mkdir(exist_ok=True)
        stack = self.stack()
        store = {"kind": "object", "url": bucket.as_uri(), "capacity": "1GiB"}
        stack["tiers"].append(store | {"load_deadline": "2min"})
        return {**stack, "across_degrees": True, **more}

    def lose_disk(self) -> None:
        """While an engine lives: at once, as it makes another folder."""
        gone = self.blocks.with_name("gone")
        self.blocks.rename(gone)
        shutil.rmtree(gone)

    def lose_tiers(self, count: int) -> None:
        """CPU memory, or that and NVMe; no engine is left of them."""
        lost = [*self.region.iterdir(), *([self.blocks] if count == 2 else [])]
        for each in lost:
            shutil.rmtree(each)

    def engine(self, model: Path, **arguments: Any) -> Engine:
        """An engine that is killed with the test at the latest."""
        named: dict[str, Any] = {"max_model_len": 4096, "dtype": "float32"} | arguments
        number = len(self._engines)
        engine = Engine(self.folder / f"engine-{number}.log", model=str(model), **named)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
        shutil.rmtree(self.region)


def chunk_tokens(engine: Engine, expected: int | None) -> int:
    """None is expected of a hybrid model: one block of vLLM's, whose size depends on the
    processor."""
    chunk: int = engine.facts()["chunk_tokens"]
    assert chunk == (expected or chunk)
    return chunk


def prompt(seed: int, length: int) -> list[int]:
    """Random text, the same for the same seed."""
    return random.Random(seed).choices(range(256), k=length)


def flip_memory(engine: Engine) -> None:
    """Change bits in all that is in the CPU memory of an engine."""
    for slab in Path(engine.facts()["region"]).parent.parent.glob("*.slab"):
        flip(slab, 6144)


def flip(path: Path, start: int) -> None:
    """Change one bit in every 8 KiB from `start` on."""
    with path.open("r+b") as file:
        for at in range(start, path.stat().st_size, 8192):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own in this folder, which is as full as a disk when it is full."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvtier-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that its file system has left; the file that has it."""
    others = folder / "others"
    with suppress(OSError), others.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return others
