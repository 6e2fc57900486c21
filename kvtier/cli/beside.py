"""What a copy into a tier must not harm there: another command's copy, another model's blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from kvtier.backends.nvme import NvmeSettings
from kvtier.backends.nvme.folder.files import used_bytes
from kvtier.backends.object.budget.budget import UNLIMITED
from kvtier.cli.console import warn
from kvtier.cli.hold import filling
from kvtier.cli.holdings import look
from kvtier.cli.measure import patient
from kvtier.cli.outlook import capacity_of
from kvtier.config import StackConfig
from kvtier.core.settings import ByteSize, Capacity, TierSettings, WritePolicy
from kvtier.core.slab.layout import committed
from kvtier.errors import KVTierError
from kvtier.types import Namespace


def alone(settings: TierSettings) -> AbstractContextManager[None]:
    """In a store two who write one block write one object; host memory has one owner."""
    if not isinstance(settings, NvmeSettings):
        return nullcontext()
    folder = Path(settings.path)
    return filling(
        folder, lambda: warn(f"another command is filling {folder}: waiting until it has ended")
    )


def to_fill(settings: TierSettings) -> TierSettings:
    """A tier as a copy opens it. In one that the stack only reads, how much others keep, and for
    how long, is up to them: nothing goes for what this stack says of that."""
    taking = patient(settings)
    if settings.write is not WritePolicy.NEVER:
        return taking
    if isinstance(settings, NvmeSettings):
        room = max(capacity_of(settings), used_bytes(Path(settings.path)))
        return msgspec.structs.replace(taking, capacity=Capacity(ByteSize(room)))
    if settings.kind == "object":
        unlimited = Capacity(ByteSize(UNLIMITED))
        return msgspec.structs.replace(taking, capacity=unlimited, age_max=None)
    return taking


def check_host_memory(config: StackConfig, tier: int, namespace: Namespace) -> None:
    """Host memory holds one namespace: filling it with another would be the end of the first, and
    raises KVTierError; so does what cannot be looked at."""
    (place,) = look(config, tier)
    if place.unseen:
        raise KVTierError(place.troubles[0])
    for slab in place.slabs:
        blocks = len(committed(slab.entries()))
        if slab.engine == config.name and slab.namespace != namespace.id and blocks:
            raise KVTierError(
                f"the CPU region of {config.name!r} holds {blocks} blocks of the namespace "
                f"{slab.namespace[:12]}, and would hold this one instead: remove them (kvtier "
                f"clear {slab.namespace[:12]} --tier cpu), or fill another tier"
            )
