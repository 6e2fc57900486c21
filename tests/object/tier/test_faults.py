"""The object tier over a folder on a disk that fails."""

from support.object.object_subjects import FOLDER

from kvtier.testing.faults import TierFaults
from kvtier.testing.subject import Rig


class TestFolderFaults(TierFaults):
    subject = FOLDER

    def check_full_service(self, rig: Rig) -> None:
        rig.settle()  # finds what was thought lost, which may be two objects of one block
        super().check_full_service(rig)  # whose room is free when one of them is deleted
