"""The CPU tier touches files only when it opens; from then on damage is done in memory."""

import random
from pathlib import Path

import pytest
from support.tiers.subjects import CPU

from kvtier.errors import MediumError
from kvtier.testing.faults import Fault, FaultyDisk, seeded
from kvtier.testing.subject import Rig, make_keys

BLOCKS = 6
AT_OPEN = (Fault.EIO, Fault.ENOSPC, Fault.LATENCY)


@pytest.mark.parametrize("seed", range(8))
def test_opening_fails_by_name_or_works(tmp_path: Path, seed: int) -> None:
    keys = make_keys(BLOCKS)
    try:
        broken = Rig(CPU, tmp_path, blocks=BLOCKS, disk=FaultyDisk(seeded(seed, 0.5, AT_OPEN)))
    except MediumError:
        pass
    else:
        assert broken.put(keys) == keys
        broken.close()
    rig = Rig(CPU, tmp_path, blocks=BLOCKS)
    rig.put(keys)
    assert rig.get(keys) == keys
    rig.close()


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_in_slabs_are_a_miss(tmp_path: Path, seed: int) -> None:
    """While it is in use and while it is not: header page, table, records."""
    dice = random.Random(seed)
    rig = Rig(CPU, tmp_path, blocks=BLOCKS)
    keys = rig.put(make_keys(BLOCKS))
    flip_bits(tmp_path, dice)
    rig.get(keys)
    flip_bits(tmp_path, dice)
    rig.reopen()
    assert rig.get(keys) == rig.resident(keys)
    new = make_keys(BLOCKS, start=100)
    taken = rig.put(new)
    assert len(taken) >= BLOCKS - 4  # what was found damaged may be kept out of use
    assert rig.get(new) == taken
    rig.close()


def flip_bits(folder: Path, dice: random.Random) -> None:
    """In the slab's files: two in the table, of which one in its header, and two in records."""
    (table,), (data,) = folder.rglob("*.table"), folder.rglob("*.slab")
    sizes = (table.stat().st_size, data.stat().st_size)
    for path, limit in zip((table, table, data, data), (64, *sizes, sizes[1]), strict=True):
        at = dice.randrange(limit)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << dice.randrange(8))]))
