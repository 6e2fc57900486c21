"""Opens what is left of a medium, and proves every block that is offered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from campaign.damage.specimens import BLOCKS, NAMESPACE, Specimen
from kvtier import Stack
from kvtier.backends.cpu import CpuSettings
from kvtier.config import MoverMode, MoverSettings, StackConfig
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity
from kvtier.testing.subject import payload
from kvtier.types import BlockKey

HOST_BYTES = 2 * BLOCKS * (record_bytes(NAMESPACE.payload_bytes) + 64) + 12288


def by_tier(specimen: Specimen) -> set[BlockKey]:
    """What the tier alone serves; raises AssertionError for a wrong byte."""
    rig = specimen.rig(specimen.folder)
    try:
        return set(rig.get(specimen.keys))
    finally:
        rig.close()


def by_stack(specimen: Specimen, host: Path, mover: MoverMode = MoverMode.THREADS) -> set[BlockKey]:
    """What a whole stack serves from it, by way of host memory and its mover."""
    memory = CpuSettings(path=str(host), capacity=Capacity(size=ByteSize(HOST_BYTES)))
    below = specimen.subject.settings(
        specimen.folder, BLOCKS, record_bytes(NAMESPACE.payload_bytes)
    )
    settings = MoverSettings(mode=mover)
    config = StackConfig(version=1, name="specimen", mover=settings, tiers=(memory, below))
    with Stack(config, NAMESPACE) as stack:
        found = stack.load(specimen.keys, 20.0)
        for tier in stack.chain.tiers[:1]:
            tier.forget(specimen.keys)
    check_payloads(found)
    return set(found)


def check_payloads(found: dict[BlockKey, bytes], wanted: Sequence[BlockKey] = ()) -> None:
    """Raise AssertionError for a block that has not its right bytes, or was not asked for."""
    for key, data in found.items():
        if data != payload(key, NAMESPACE):
            raise AssertionError(f"wrong bytes were served for {key.hex()}")
