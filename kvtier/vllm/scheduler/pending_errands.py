"""What workers have been asked to do and have not all reported yet."""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from kvtier.core.chain.in_flight import Ticket
from kvtier.types import BlockKey, Outcome
from kvtier.vllm.protocol import Report

logger = logging.getLogger(__name__)


class Pending(msgspec.Struct):
    """An errand that not all ranks have reported yet."""

    request: str
    keys: list[BlockKey]
    """As the tiers know them, in the errand's order."""
    left: int
    ticket: Ticket | None = None
    """Of a load; None for a store."""
    grown: list[BlockKey] = []
    """Those of a store in the order of their tokens."""
    report: Report | None = None
    distrusted: bool = False
    """A store of what may have been computed from blocks that were never loaded."""

    def merge(self, report: Report) -> Report | None:
        """What all ranks say, once they all have."""
        self.report = report if self.report is None else self.report.merge(report)
        self.left -= report.ranks
        return self.report if self.left <= 0 else None

    def failed(self, report: Report) -> dict[BlockKey, Outcome]:
        """What did not make it, and why."""
        failures = report.failures
        return {key: failures[at] for at, key in enumerate(self.keys) if at in failures}

    def tell_of_loss(self, outcomes: Collection[Outcome], late: bool) -> None:
        """Log that a load has not come: it failed, or was only `late`."""
        blocks, request = len(self.keys), self.request
        if late:
            logger.info(
                "a load of %d blocks for request %s takes longer than computing: it is not awaited",
                blocks,
                request,
            )
        else:
            logger.warning(
                "a load of %d blocks for request %s failed (%s): it is recomputed",
                blocks,
                request,
                ", ".join(sorted({outcome.value for outcome in outcomes})),
            )
