"""kvtier without an engine: python examples/embedded.py FOLDER

FOLDER is one of its own: of what other stacks keep in it, no more would stay than fits into 64 MiB.
"""

import hashlib
import sys

from kvtier import Namespace, Stack, block_key

PAYLOAD = 128 << 10
# Everything that makes bytes interchangeable. Other facts: another namespace, no hits.
NAMESPACE = Namespace(facts={"model": "example", "dtype": "bfloat16"}, group_bytes=(PAYLOAD,))


def main(folder: str) -> None:
    stack_file = {
        "version": 1,
        "name": "embedded-example",
        "tiers": [
            {"kind": "cpu", "capacity": "8MiB", "persistence": "discard"},
            {"kind": "nvme", "path": folder, "capacity": "64MiB", "free_floor": "0B"},
        ],
    }
    hashes = [hashlib.sha256(b"block %d" % number).digest() for number in range(100)]
    blocks = {block_key(each): each * (PAYLOAD // len(each)) for each in hashes}
    first, *others = blocks

    with Stack.open(stack_file, NAMESPACE) as stack:
        assert stack.store(blocks) == list(blocks), "it waits for room, and says what it has taken"
        assert stack.settle(), "all is on the disk, and nothing was lost"

    with Stack.open(stack_file, NAMESPACE) as stack:  # a restart: CPU memory is empty
        assert stack.load(list(blocks)) == blocks, "every block is there, and is what was stored"
        stats = stack.stats()
        stack.delete([first])
        assert first not in stack
        assert stack.lookup(others).keys() == set(others)
    for tier, hits in zip(stats.tiers, stats.hits, strict=True):
        print(f"{tier.medium:5} {tier.blocks:4} blocks, {hits:4} hits")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "kvtier-example")
