"""The cpu tier beside the memory model."""

import pytest
from hypothesis import settings
from support.tiers.subjects import CPU

from kvtier.testing.stateful import SETTINGS, tier_machine


class TestCpuBriefly(tier_machine(CPU).TestCase):  # type: ignore[misc]
    settings = settings(SETTINGS, max_examples=25)


@pytest.mark.slow
class TestCpuBesideTheModel(tier_machine(CPU).TestCase):  # type: ignore[misc]
    """As many examples as for any tier."""
