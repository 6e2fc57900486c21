"""The object tier over a folder on a disk that fails."""

from object_subjects import FOLDER

from kvtier.testing.fault_suite import TierFaults


class TestFolderFaults(TierFaults):
    subject = FOLDER
