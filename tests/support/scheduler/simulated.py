"""A stack that is simulated alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cli.trace_simulation import Request, Simulation, TierPlan, Trace, simulate_all


def simulate(requests: Sequence[Request], plans: Sequence[TierPlan]) -> Simulation:
    """Run a trace through a stack of these tiers, the first of which is host memory."""
    return simulate_all([(Trace(requests), plans)])[0]
