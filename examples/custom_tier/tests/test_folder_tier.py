"""The shipped suites, held against the folder tier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from folder_subject import SUBJECT
from kvtier_folder import FolderTier

from kvtier.testing.contract import TierContract
from kvtier.testing.faults import TierFaults
from kvtier.testing.stateful import tier_machine
from kvtier.testing.subject import Rig, make_keys
from kvtier.types import BlockKey


class TestFolderContract(TierContract):
    subject = SUBJECT


class TestFolderFaults(TierFaults):
    subject = SUBJECT


TestFolderBesideTheModel = tier_machine(SUBJECT).TestCase


class Asked(Counter[BlockKey]):
    """Pins that count how often it was asked whether a block is pinned."""

    times = 0

    def __contains__(self, key: object) -> bool:
        self.times += 1
        return super().__contains__(key)


def test_a_store_looks_at_no_more_blocks_than_have_to_go(tmp_path: Path) -> None:
    """The scheduler waits for it, and a folder may hold a million."""
    rig = Rig(SUBJECT, tmp_path, blocks=64)
    tier = rig.tier
    assert isinstance(tier, FolderTier)
    keys = make_keys(72)
    rig.put(keys[:60])
    for new, most in ((keys[60:64], 0), (keys[64:], 4 * 8)):
        tier._pins = asked = Asked()
        assert rig.put(new) == new
        assert asked.times <= most
    tier._pins = asked = Asked()
    assert len(tier.victims(3)) == asked.times == 3
    rig.close()
