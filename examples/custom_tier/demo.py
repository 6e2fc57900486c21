"""Stores blocks through memory into a folder, restarts, and finds them there.

BLOCKS=/tmp/blocks python demo.py
"""

import hashlib
from pathlib import Path

from kvtier.stack import Stack
from kvtier.types import Namespace, block_key

STACK = Path(__file__).with_name("stack.yaml")
NAMESPACE = Namespace(facts={"model": "demo"}, group_bytes=(1 << 20,))


def main() -> None:
    hashes = [hashlib.sha256(f"block {number}".encode()).digest() for number in range(8)]
    blocks = {block_key(one): one * (NAMESPACE.payload_bytes // len(one)) for one in hashes}

    with Stack.open(STACK, NAMESPACE) as stack:
        taken = stack.store(blocks)
        stack.settle()
        print(f"stored {len(taken)} blocks")

    with Stack.open(STACK, NAMESPACE) as stack:  # memory is empty again, the folder is not
        found = stack.load(list(blocks))
        print(f"found {len(found)} blocks after a restart")
        assert found == blocks


if __name__ == "__main__":
    main()
