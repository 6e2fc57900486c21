"""Stacks on a Mooncake pool, as servers have them, and a writer that is there to be killed.

    python mooncake_server.py MASTER PREFIX START     # says one line for each eight blocks

Each has a mover in a process of its own, and no disk.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from kvtier import Stack
from kvtier.move.process import ProcessMover
from kvtier.testing.subject import make_keys, make_memory_folder
from kvtier.types import BlockKey, Namespace

NAMESPACE = Namespace(facts={"model": "mooncake"}, group_bytes=(256 << 10,))
NEW = count(10_000, 1000)
BATCH = 8
LENT = "64MiB"


def payload(key: BlockKey) -> bytes:
    return hashlib.shake_128(key).digest(NAMESPACE.payload_bytes)


class MooncakeServer:
    """A stack with the pool below its host memory."""

    def __init__(
        self, name: str, master: str, prefix: str, cpu: str = "32MiB", lends: str = "0"
    ) -> None:
        self.region = make_memory_folder()
        pool = {"kind": "mooncake", "master": master, "prefix": prefix, "capacity": "1GiB"}
        self.stack = Stack.open(
            {
                "version": 1,
                "name": name,
                "load_policy": "always",
                "tiers": [
                    {"kind": "cpu", "path": str(self.region), "capacity": cpu},
                    pool | {"lends": lends},
                ],
            },
            NAMESPACE,
            serving=True,
        )
        self.chain = self.stack.chain

    @property
    def mover(self) -> Path:
        """The process of its mover."""
        mover = self.stack.mover
        assert isinstance(mover, ProcessMover)
        assert mover.pid is not None
        return Path(f"/proc/{mover.pid}")

    def store(self, keys: Sequence[BlockKey]) -> None:
        """As far as there is room; whatever comes of it, nothing raises."""
        self.stack.store({key: payload(key) for key in keys})
        self.stack.settle()

    def load(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """What arrives, every byte of it right; of that, host memory keeps nothing."""
        self.chain.tiers[0].forget(keys)
        found = self.stack.load(keys)
        assert all(found[key] == payload(key) for key in found)
        return [key for key in keys if key in found]

    def gives(self, other: MooncakeServer, blocks: int = BATCH) -> bool:
        """Whether another finds what is stored here now."""
        keys = make_keys(blocks, start=next(NEW))
        self.store(keys)
        return other.load(keys) == keys

    def close(self) -> None:
        self.stack.close()
        shutil.rmtree(self.region)


class Writer:
    """A server in processes of its own that lends memory, and stores until it is killed."""

    def __init__(self, master: str, prefix: str, start: int) -> None:
        command = [sys.executable, __file__, master, prefix, str(start)]
        self._start = start
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._told = self._process.stdout
        assert self._told is not None
        self._mover, self._region = self._told.readline().split()

    def killed_after(self, batches: int) -> list[BlockKey]:
        """Kill it while it stores what follows; all that it may have stored."""
        assert self._told is not None
        for _ in range(batches):
            assert self._told.readline()
        self._process.kill()
        self._process.communicate()
        while Path("/proc", self._mover).exists():  # which ends with it
            pass
        shutil.rmtree(self._region, ignore_errors=True)  # so does whoever tidies up behind the dead
        return make_keys((batches + 2) * BATCH, start=self._start)


def main() -> None:
    master, prefix, start = sys.argv[1:]
    server = MooncakeServer("writer", master, prefix, lends=LENT)
    print(server.mover.name, server.region, flush=True)
    for at in count(int(start), BATCH):
        server.store(make_keys(BATCH, start=at))
        print(at, flush=True)


if __name__ == "__main__":
    main()
