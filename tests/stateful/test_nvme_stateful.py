"""The nvme tier beside the memory model."""

import pytest
from hypothesis import settings
from support.tiers.subjects import NVME

from kvtier.testing.stateful import SETTINGS, tier_machine


class TestNvmeBriefly(tier_machine(NVME).TestCase):  # type: ignore[misc]
    settings = settings(SETTINGS, max_examples=25)


@pytest.mark.slow
class TestNvmeBesideTheModel(tier_machine(NVME).TestCase):  # type: ignore[misc]
    """As many examples as for any tier."""
