"""The reference model beside itself: whatever the machine asks for, it must be able to give."""

import pytest
from hypothesis import settings
from support.tiers.subjects import MEMORY

from kvtier.testing.stateful import SETTINGS, tier_machine


class TestMemoryBriefly(tier_machine(MEMORY).TestCase):  # type: ignore[misc]
    settings = settings(SETTINGS, max_examples=40)


@pytest.mark.slow
class TestMemoryBesideTheModel(tier_machine(MEMORY).TestCase):  # type: ignore[misc]
    """As many examples as for any tier."""
