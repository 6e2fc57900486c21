"""The nvme tier keeps the contract, with one slab and with many."""

from support.tiers.subjects import NVME, SLABS

from kvtier.testing.contract import BLOCKS, STILL_OR_NO_LONGER_THERE, TierContract
from kvtier.testing.subject import Rig, make_keys


class TestNvme(TierContract):
    subject = NVME


class TestNvmeSlabs(TierContract):
    subject = SLABS

    def test_clear_drops_what_is_resident_and_frees_pinned_room_later(self, rig: Rig) -> None:
        """It gives all slabs up; new ones come one by one, at the keeper's pace."""
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:2])
        rig.tier.clear()
        assert rig.resident(keys) == []
        assert set(rig.read(keys[:2], spec).values()) <= STILL_OR_NO_LONGER_THERE
        rig.tier.complete_load(keys[:2])
        rig.settle()
        new = rig.put(make_keys(BLOCKS, start=100))
        assert new
        assert rig.get(new) == new
        rig.check_room()
