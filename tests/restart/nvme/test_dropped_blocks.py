"""What was dropped stays dropped, at whatever moment its process is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine

from kvtier.testing.subject import make_keys, sealed
from kvtier.types import BlockKey, LoadStoreSpec

KEYS = make_keys(8)
VICTIM, OTHERS, NEW = KEYS[0], KEYS[1:4], KEYS[4:]


def write(engine: Engine, keys: list[BlockKey], spec: LoadStoreSpec) -> None:
    outcomes = engine.handler.store(spec, keys, [sealed(key) for key in keys])
    assert all(outcome.ok for outcome in outcomes)
    engine.tier.complete_store(keys)


def full(folder: Path) -> Engine:
    """Four slots, all of them used, the victim least recently."""
    engine = Engine(folder, blocks=4)
    assert engine.put([VICTIM, *OTHERS]) == [VICTIM, *OTHERS]
    return engine


def live(folder: Path, again: bool) -> None:
    """Evict a block, store it again, perhaps, before its slot is written, drop it, and die."""
    engine = full(folder)
    tier = engine.tier
    assert tier.prepare_store(NEW[:1]).evicted == [VICTIM]
    if again:
        taken = tier.prepare_store([VICTIM])
        assert taken.keys == [VICTIM]
        write(engine, taken.keys, taken.spec)
    tier.forget([VICTIM])
    tier.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("again", [True, False])
def test_what_was_evicted_and_dropped_is_not_found_in_its_first_slot(
    tmp_path: Path, again: bool
) -> None:
    pid = os.fork()
    if not pid:
        try:
            live(tmp_path, again)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    engine = Engine(tmp_path, blocks=4)
    found = engine.hits([VICTIM, *OTHERS])
    assert VICTIM not in found
    assert len(found) == (2 if again else 3), "what was not dropped is there"
    engine.close()


def test_a_slot_that_was_written_meanwhile_is_left_alone(tmp_path: Path) -> None:
    engine = full(tmp_path)
    taken = engine.tier.prepare_store(NEW[:1])
    outcomes = engine.handler.store(taken.spec, taken.keys, [sealed(NEW[0])])
    assert all(outcome.ok for outcome in outcomes)
    engine.tier.forget([VICTIM])
    engine.tier.complete_store(taken.keys)
    engine.tier.flush()
    engine.close()
    engine = Engine(tmp_path, blocks=4)
    assert engine.hits([VICTIM, *NEW]) == NEW[:1]
    engine.close()
