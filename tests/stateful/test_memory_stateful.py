"""The reference model beside itself: whatever the machine asks for, it must be able to give."""

from hypothesis import settings
from subjects import MEMORY

from kvtier.testing.stateful import SETTINGS, tier_machine


class TestMemoryBesideTheModel(tier_machine(MEMORY).TestCase):  # type: ignore[misc]
    settings = settings(SETTINGS, max_examples=40)
