"""Prompts that one engine computes and another goes on with, by way of a tier that both have.

A router sends a prompt to an engine that is to compute it, and sends what that one answers in
`kv_transfer_params` with the same prompt to another, which waits a little for the blocks. These are
the words of vLLM's connectors from engine to engine, so that routers made for them will do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvtier.core.chain.plan import COMING, NOWHERE
from kvtier.core.chain.tier_chain import TierChain
from kvtier.core.costs.chunk_spans import Shape
from kvtier.core.costs.model import CostModel
from kvtier.vllm.scheduler.request_state import RequestState

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""An engine stores a prompt within a second: so long is waited for it at least."""
_DOUBT_MAX = 8
"""What comes at all comes within an eighth of a second, mostly: enough to learn that it does."""
_AWAY = (NOWHERE, COMING)
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
        expected = state.expected
        if expected is None or len(self._chain.tiers) == 1:  # nobody else has its only tier
            return False
        begins, stop = state.furthest(shapes)
        places = self._chain.locate(list(begins))
        lacking = [key for key, at in zip(begins, places, strict=True) if at in _AWAY]
        if lacking:
            expected.lacking = lacking[-1]
            expected.until = expected.since + self._patience(begins[lacking[0]], stop)
            if self._clock() < expected.until:
                return True
        state.expected = None
        if lacking and self._doubt < _DOUBT_MAX:  # else of each request, as long as nothing comes
            logger.info("request %s: what another engine has computed did not come", request)
        self._doubt = min(2 * self._doubt, _DOUBT_MAX) if lacking else 1
        return False

    def _patience(self, start: int, stop: int) -> float:
        """How long to wait, if what lies between these tokens is not there."""
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        return max(computing or 0.0, WAIT_S) / self._doubt

    def still_waits(self, state: RequestState) -> bool:
        """Whether nothing has changed for a request that waits: asked in each step, of many that
        may have long prompts."""
        expected = state.expected
        if expected is None or expected.lacking is None or self._clock() >= expected.until:
            return False
        return self._chain.locate([expected.lacking])[0] in _AWAY
