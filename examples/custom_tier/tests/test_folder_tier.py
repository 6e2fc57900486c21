"""The shipped suites, held against the folder tier."""

from __future__ import annotations

from folder_subject import SUBJECT

from kvtier.testing.contract import TierContract
from kvtier.testing.fault_suite import TierFaults
from kvtier.testing.stateful import tier_machine


class TestFolderContract(TierContract):
    subject = SUBJECT


class TestFolderFaults(TierFaults):
    subject = SUBJECT


TestFolderBesideTheModel = tier_machine(SUBJECT).TestCase
