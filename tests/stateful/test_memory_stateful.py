"""The reference model beside itself: whatever the machine asks for, it must be able to give."""

from subjects import MEMORY

from kvtier.testing.stateful import tier_machine

TestMemoryBesideTheModel = tier_machine(MEMORY).TestCase
