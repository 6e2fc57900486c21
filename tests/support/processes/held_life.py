"""A life that is killed between commit and write: `held_life.py CONFIG HELD BLOCKS USED`.

It commits so many blocks, uses the first few again, and dies before any is written into the tier of
the number `HELD`. With no blocks it only finds what is there, and dies before it has caught up.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec

from kvtier import Stack
from kvtier.chain.store import Cascade, StoreLink
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey


def live(config: dict[str, Any], held: int, count: int, used: int) -> None:
    """Open the stack, hold back what goes into one tier, die."""
    write = Cascade._write

    def write_elsewhere(
        cascade: Cascade,
        link: StoreLink,
        keys: Sequence[BlockKey],
        now: float,
        *,
        old: bool = False,
    ) -> None:
        if link.target != held:
            write(cascade, link, keys, now, old=old)

    with mock.patch.object(Cascade, "_write", write_elsewhere):
        stack = Stack.open(config, NAMESPACE)
        keys = make_keys(count)
        assert stack.store({key: payload(key) for key in keys}) == keys
        assert len(stack.load(keys[:used])) == used
        if count:
            assert stack.settle()
        found = [tier.stats().blocks for tier in stack.chain.tiers]
        assert found[held] == 0, found
        assert found[held - 1] >= count, found
        for tier in stack.chain.tiers:
            tier.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    live(msgspec.json.decode(sys.argv[1]), *map(int, sys.argv[2:]))
