"""The nvme tier beside the memory model."""

from subjects import NVME

from kvtier.testing.stateful import tier_machine

TestNvmeBesideTheModel = tier_machine(NVME).TestCase
