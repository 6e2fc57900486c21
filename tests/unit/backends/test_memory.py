"""What the memory tier has beyond the contract: its store, its door, its limits."""

import gc

import pytest

from kvtier.errors import ConfigError, MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity
from kvtier.testing.memory import BACKEND, MemoryHandler, MemorySettings, MemoryTier
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import LoadStoreSpec, Outcome

SLOT = record_bytes(NAMESPACE.payload_bytes)
CONTEXT = TierContext(NAMESPACE, "unit")


def sized(size: int, **more: str) -> MemorySettings:
    return MemorySettings(capacity=Capacity(size=ByteSize(size)), **more)


def test_capacity_is_whole_slots() -> None:
    stats = BACKEND.open_tier(sized(4 * SLOT - 1), CONTEXT).stats()
    assert stats.bytes_capacity == 3 * SLOT


def test_a_share_of_the_machine_is_a_capacity() -> None:
    BACKEND.check(MemorySettings(capacity=Capacity.parse("1%")), SLOT)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        BACKEND.check(sized(SLOT, eviction="adaptive"), SLOT)
    assert caught.value.place == ".eviction"
    with pytest.raises(ConfigError) as caught:
        BACKEND.check(sized(0), None)
    assert caught.value.place == ".capacity"


def test_a_store_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(MediumError, match="raise its capacity"):
        BACKEND.open_tier(sized(SLOT - 1), CONTEXT)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MediumError, match="lower the memory tier's capacity"):
        BACKEND.open_tier(sized(1 << 60), CONTEXT)


def test_the_handler_finds_its_tier_by_name() -> None:
    tier = BACKEND.open_tier(sized(2 * SLOT), CONTEXT)
    other = BACKEND.open_tier(sized(2 * SLOT, name="other"), CONTEXT)
    assert reach(tier, BACKEND.open_handler(sized(2 * SLOT), CONTEXT))
    assert reach(other, BACKEND.open_handler(sized(2 * SLOT, name="other"), CONTEXT))
    for stranger in (TierContext(NAMESPACE, "another engine"), CONTEXT):
        with pytest.raises(MediumError, match="open its tier first"):
            BACKEND.open_handler(sized(SLOT, name="third"), stranger)


def reach(tier: MemoryTier, handler: MemoryHandler) -> bool:
    """Whether what is written through the handler lies in the tier's store."""
    reservation = tier.prepare_store(make_keys(1))
    handler.views(reservation.spec)[0][:5] = b"there"
    return bytes(tier.store.record(0)[:5]) == b"there"


def test_a_store_goes_with_its_last_user() -> None:
    tier = BACKEND.open_tier(sized(SLOT, name="short"), CONTEXT)
    handler = BACKEND.open_handler(sized(SLOT, name="short"), CONTEXT)
    del tier
    gc.collect()
    assert BACKEND.open_handler(sized(SLOT, name="short"), CONTEXT)
    del handler
    gc.collect()
    with pytest.raises(MediumError):
        BACKEND.open_handler(sized(SLOT, name="short"), CONTEXT)


def test_what_landed_is_known_until_the_slot_changes_hands() -> None:
    tier = BACKEND.open_tier(sized(SLOT), CONTEXT)
    handler = BACKEND.open_handler(sized(SLOT), CONTEXT)
    (key,) = make_keys(1)
    reservation = tier.prepare_store([key])
    handler.landed(reservation.spec, 0, Outcome.IO_ERROR)
    assert tier.store.landed == {0: Outcome.IO_ERROR}
    tier.complete_store([key], {key: Outcome.IO_ERROR})
    assert tier.store.landed == {}
    assert tier.store.owners == {}


def test_specs_of_others_are_a_mistake() -> None:
    BACKEND.open_tier(sized(SLOT), CONTEXT)
    tier = BACKEND.open_tier(sized(SLOT), CONTEXT)
    handler = BACKEND.open_handler(sized(SLOT), CONTEXT)
    with pytest.raises(TypeError):
        handler.views(LoadStoreSpec())
    with pytest.raises(IndexError):
        tier.store.record(1)
