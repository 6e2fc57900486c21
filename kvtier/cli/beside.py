"""What a copy into a tier must not harm there: another command's copy, another model's blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kvtier.backends.nvme import NvmeSettings
from kvtier.cli.console import warn
from kvtier.cli.hold import filling
from kvtier.cli.holdings import look
from kvtier.config import StackConfig
from kvtier.core.settings import TierSettings
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


def check_host_memory(config: StackConfig, tier: int, namespace: Namespace) -> None:
    """Host memory holds one namespace: filling it with another would be the end of the first, and
    raises KVTierError."""
    for slab in look(config, tier)[0].slabs:
        blocks = len(committed(slab.entries()))
        if slab.engine == config.name and slab.namespace != namespace.id and blocks:
            raise KVTierError(
                f"the CPU region of {config.name!r} holds {blocks} blocks of the namespace "
                f"{slab.namespace[:12]}, and would hold this one instead: remove them (kvtier "
                f"clear {slab.namespace[:12]} --tier cpu), or fill another tier"
            )
