"""Moved to `kvtier.core.transfer`: the chain in core speaks it. Import from there."""

from kvtier.core.transfer import (
    Mover,
    MoverStats,
    Transfer,
    TransferKind,
    TransferResult,
)

__all__ = ["Mover", "MoverStats", "Transfer", "TransferKind", "TransferResult"]
