"""The object tier over a folder on a disk that fails."""

import pytest
from support.object.object_subjects import FOLDER

from kvtier.backends.object.lease import read_term
from kvtier.testing.faults import TierFaults
from kvtier.testing.subject import Rig


@pytest.mark.slow
class TestFolderFaults(TierFaults):
    subject = FOLDER

    def check_full_service(self, rig: Rig) -> None:
        self._end_unreadable_lease(rig)
        rig.settle()  # finds what was thought lost, which may be two objects of one block
        super().check_full_service(rig)  # whose room is free when one of them is deleted

    def _end_unreadable_lease(self, rig: Rig) -> None:
        """Nobody knows whose lease it is if a flipped bit is in the report of it, so nothing is
        stored until it has run out: 90 seconds, for which this does not wait."""
        reports = sorted((rig.folder / "store" / "caretaker").glob("[0-9]*"))
        if reports and read_term(memoryview(reports[-1].read_bytes())) is None:
            rig.close()
            reports[-1].unlink()
            rig.open()
