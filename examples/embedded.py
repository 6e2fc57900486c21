"""kvtier without an engine: open a stack, store blocks, restart, load them back.

python examples/embedded.py FOLDER

FOLDER is one of its own: of what other stacks keep in it, no more would stay than fits into 64 MiB.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from kvtier import Namespace, Stack, block_key

PAYLOAD = 128 << 10


def main(folder: Path) -> None:
    # Everything that makes bytes interchangeable. Other facts: another namespace, no hits.
    namespace = Namespace(facts={"model": "example", "dtype": "bfloat16"}, group_bytes=(PAYLOAD,))
    stack_file = {
        "version": 1,
        "name": "embedded-example",
        "tiers": [
            {"kind": "cpu", "capacity": "8MiB", "persistence": "discard"},
            {"kind": "nvme", "path": str(folder), "capacity": "64MiB", "free_floor": "0B"},
        ],
    }
    blocks = {
        block_key(hashlib.sha256(b"block %d" % i).digest()): bytes([i]) * PAYLOAD
        for i in range(100)
    }

    with Stack.open(stack_file, namespace) as stack:
        for key, payload in blocks.items():
            stack.store({key: payload})
            stack.settle()  # wait for the cascade; a server does not

    with Stack.open(stack_file, namespace) as stack:  # a restart: CPU memory is empty
        found = stack.load(list(blocks))
        stats = stack.chain.chain_stats()
    assert found == blocks, "every block is there, and is what was stored"
    for tier, hits in zip(stats.tiers, stats.hits, strict=True):
        print(f"{tier.medium:5} {tier.blocks:4} blocks, {hits:4} hits")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "kvtier-example"))
