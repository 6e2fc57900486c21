"""The object tier keeps the contract of every tier."""

from object_subjects import FOLDER

from kvtier.testing.contract import TierContract


class TestFolder(TierContract):
    subject = FOLDER
