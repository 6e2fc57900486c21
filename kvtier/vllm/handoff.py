"""Prompts that one engine computes and another goes on with, by way of a tier that both have.

A router sends a prompt to an engine that is to compute it, and sends what that one answers in
`kv_transfer_params` with the same prompt to another, which waits a little for the blocks. These are
the words of vLLM's connectors from engine to engine, so that routers made for them will do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvtier.core.chain import TierChain
from kvtier.core.costs import CostModel
from kvtier.core.offers import Shape
from kvtier.core.plan import COMING, NOWHERE
from kvtier.vllm.requests import RequestState

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""An engine stores a prompt within a second: so long is waited for it at least."""
_DOUBT_MAX = 8
"""What comes at all comes within an eighth of a second, mostly: enough to learn that it does."""
_COMPUTE, _EXPECT = "do_remote_decode", "do_remote_prefill"


def is_expected(said: object) -> bool:
    """Whether another engine has computed the prompt of a request that came with this."""
    return _says(said, _EXPECT)


def answer(said: object) -> dict[str, bool] | None:
    """What to tell the engine that goes on with the prompt of a request that came with this; None
    if there is none."""
    return {_EXPECT: True, _COMPUTE: False} if _says(said, _COMPUTE) else None


def _says(said: object, name: str) -> bool:
    return isinstance(said, Mapping) and said.get(name) is True


class Arrivals:
    """Knows which requests had better wait for blocks that another engine has computed: no longer
    than computing them takes, and where they do not come, less each time."""

    def __init__(
        self, chain: TierChain, costs: CostModel | None, clock: Callable[[], float]
    ) -> None:
        self._chain = chain
        self._costs = costs
        self._clock = clock
        self._doubt = 1

    def awaits(self, request: str, state: RequestState, shapes: Mapping[int, Shape]) -> bool:
        """Whether a request that the engine asks about is to wait."""
        if not state.expected or len(self._chain.tiers) == 1:  # nobody else has its only tier
            return False
        keys, stop = state.furthest(shapes)
        come = {NOWHERE, COMING}.isdisjoint(self._chain.locate(keys))
        if not come and self._is_worth(state, stop):
            return True
        state.expected = False
        self._doubt = 1 if come else min(2 * self._doubt, _DOUBT_MAX)
        if not come:
            logger.info("request %s: what another engine has computed did not come", request)
        return False

    def _is_worth(self, state: RequestState, stop: int) -> bool:
        now = self._clock()
        if state.expected_since is None:
            state.expected_since = now
        computing = self._costs.recompute_seconds(state.start, stop) if self._costs else None
        return now - state.expected_since < max(computing or 0.0, WAIT_S) / self._doubt
