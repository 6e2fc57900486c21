"""Why requests found less than their prompts: the first token of which nothing was found, and the
reason.

The chain knows what became of a block by its key. Which other salt, adapter or weights a prompt was
computed for cannot be seen from keys: so prompts are remembered by their tokens alone, too. Both
are bounded, and what was forgotten looks like what was never computed.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from kvtier.chain.hits import Shape, windowed
from kvtier.chain.misses import Cause, HashRing, Past
from kvtier.chain.plan import leading
from kvtier.chain.tier_chain import TierChain
from kvtier.types import BlockKey, MissReason, Namespace, Outcome
from kvtier.vllm.requests import RequestState

logger = logging.getLogger(__name__)

KEPT = 1024
"""So many of the last explanations can be asked for."""
_PROMPT_ROWS, _CONTEXTS_MAX = 1 << 17, 1 << 14
_REASON_OF = {
    Outcome.CORRUPT: MissReason.CORRUPT,
    Outcome.GONE: MissReason.EVICTED,
    Outcome.TIMEOUT: MissReason.LOAD_LATE,
}


class PromptFacts(NamedTuple):
    """A prompt, and what else its keys depend on."""

    length: int
    """How many tokens it has."""
    tokens: Sequence[int] = ()
    """These, if it is of tokens alone."""
    salt: str = ""
    adapter: str = ""


class Miss(msgspec.Struct):
    """What a request found of its prompt, and why not more."""

    request: str
    at: float
    """Seconds since 1970."""
    prompt_tokens: int
    engine_tokens: int
    """The leading tokens that vLLM's own cache has."""
    tier_tokens: int
    """Those after them that the tiers have."""
    missed_tokens: int = 0
    """From the first one that was not found to the end of the last whole chunk."""
    reason: str = ""
    """Of a `MissReason`; "" if all was found that is ever kept."""
    detail: str = ""
    key: str = ""
    """Of the first block that was not found, in hexadecimal."""
    namespace: str = ""
    """The engine's."""

    @property
    def token(self) -> int:
        """The first one of which nothing was found."""
        return self.engine_tokens + self.tier_tokens

    @property
    def sentence(self) -> str:
        """What was found, and why not more."""
        found = (
            f"{self.token} of {self.prompt_tokens} tokens found "
            f"({self.engine_tokens} by vLLM itself, {self.tier_tokens} in the tiers)"
        )
        if not self.reason:
            return found
        reason = next(each for each in MissReason if each.label == self.reason)
        detail = f" ({self.detail})" if self.detail else ""
        return f"{found}; {self.missed_tokens} missed from there on: {reason.sentence}{detail}"


class _Context(NamedTuple):
    """What a prompt's keys depend on beside its tokens."""

    epoch: bytes
    salt: int
    adapter: str


class PromptMemory:
    """Remembers by their tokens alone which prompts were computed, and in which contexts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._forget()

    def _forget(self) -> None:
        self._ring = HashRing(_PROMPT_ROWS)
        self._contexts: list[_Context] = []
        self._numbers: dict[_Context, int] = {}

    def computes(
        self, context: _Context, digests: Sequence[int], first: int
    ) -> tuple[_Context, float] | None:
        """A prompt's chunks from this one on are computed in this context: in which one that was
        done before, and how many seconds ago. `digests` are those of all its leading chunks."""
        number, now = self._number(context), self._clock() - self._began
        before = next(self._ring.find(digests[first]), None)
        fresh = digests[first:]
        if first and all(fact != number for fact, _ in self._ring.find(digests[0])):
            fresh = [digests[0], *fresh]
        self._ring.add(np.array(fresh, np.uint64), number, now)
        return None if before is None else (self._contexts[before[0]], now - before[1])

    def _number(self, context: _Context) -> int:
        number = self._numbers.get(context)
        if number is None:
            if len(self._contexts) >= _CONTEXTS_MAX:
                self._forget()
            number = self._numbers[context] = len(self._contexts)
            self._contexts.append(context)
        return number


def _digests(tokens: Sequence[int], step: int, stop: int) -> list[int]:
    """A digest of all tokens up to the end of each chunk."""
    digest, found = xxhash.xxh3_64(), []
    for end in range(step, min(stop, len(tokens)) + 1, step):
        digest.update(msgspec.msgpack.encode(tokens[end - step : end]))
        found.append(digest.intdigest())
    return found


def _difference(context: _Context, before: _Context) -> tuple[MissReason, str]:
    """What kept a prompt from being found that was computed in another context before."""
    if before.epoch != context.epoch:
        return MissReason.RESET, ""
    if before.adapter != context.adapter:
        return MissReason.OTHER_ADAPTER, before.adapter or "without an adapter"
    return MissReason.OTHER_SALT, ""


class RequestMisses:
    """Explains of each request what it did not find, once; counts that by reason, and keeps the
    last explanations."""

    def __init__(
        self,
        chain: TierChain,
        namespace: Namespace,
        elsewhere: Callable[[Sequence[BlockKey]], str | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        log: bool = False,
    ) -> None:
        """`elsewhere` says in which facts another namespace differs that has one of these blocks;
        None if none has."""
        self._chain = chain
        self._sizes, self._namespace = namespace.group_bytes, namespace.id
        self._elsewhere = elsewhere
        self._log = log
        self._prompts = PromptMemory(clock)
        self.latest: deque[Miss] = deque(maxlen=KEPT)
        self.counts = {reason: [0, 0] for reason in MissReason}
        """Requests and tokens."""

    # -- requests that are about to be computed, or loaded ----------------------------------------

    def explain(
        self,
        request: str,
        state: RequestState,
        shapes: Mapping[int, Shape],
        loads: int,
        prompt: PromptFacts,
        epoch: bytes,
    ) -> None:
        """A request was looked up, and `loads` so many tokens. It computes the rest."""
        if state.explained:
            return
        state.explained = True
        found, step = state.start + loads, max(shape.tokens for shape in shapes.values())
        miss = Miss(request, time.time(), prompt.length, state.start, loads)
        miss.namespace = self._namespace
        if state.refused:
            end = state.limit // step * step
        else:  # without an answer, vLLM did not ask for any block: it has all whole chunks itself
            end = found if state.hits is None else state.stop(shapes)
        if end - found <= 1:  # of windows, the last token is left to be computed
            self.latest.append(miss)
            return
        if state.refused:
            self._add(miss, end, MissReason.UNTRUSTED, "")
            return
        key = self._first_missing(state, shapes, found, end)
        miss.key = key.hex()
        reason, detail = self._reason(state, key)
        digests = _digests(prompt.tokens, step, end)
        if found // step < len(digests):
            context = _Context(epoch, hash(prompt.salt) if prompt.salt else 0, prompt.adapter)
            before = self._prompts.computes(context, digests, found // step)
            if reason is MissReason.NOT_COMPUTED and before is not None:
                reason, detail = self._as_before(context, *before)
        if reason is MissReason.NOT_COMPUTED:
            rest = state.columns[0].known[found // step :] if state.is_prefix(shapes) else [key]
            if (facts := self._elsewhere(rest)) is not None:
                reason, detail = MissReason.OTHER_NAMESPACE, facts
        self._add(miss, end, reason, detail)

    def _first_missing(
        self, state: RequestState, shapes: Mapping[int, Shape], found: int, end: int
    ) -> BlockKey:
        """The block without which a hit ends where it does."""
        spans = state.spans(shapes, self._sizes)
        step = max(span.shape.tokens for span in spans)
        shortest, known = found // step * step + step, end
        for span in spans:
            if span.shape.window is None:
                first = found // span.shape.tokens
                rest = span.keys[first : end // span.shape.tokens]
                at = self._leading(rest)
                if at < len(rest) and (first + at) * span.shape.tokens < shortest:
                    return rest[at]
                known = min(known, (first + at) * span.shape.tokens)
        # All of it is there that has no window: a window lacks at the end of that, or nothing does.
        known = max(known // step * step, shortest)
        spans = windowed(spans) or spans
        wanted = [span.keys[at] for span in spans for at in span.needed(found, known)]
        at = self._leading(wanted)
        return wanted[at if at < len(wanted) else 0]

    def _leading(self, keys: Sequence[BlockKey]) -> int:
        """How many of these come before the first that no tier gives now."""
        return leading(self._chain.locate(keys))

    def _reason(self, state: RequestState, key: BlockKey) -> tuple[MissReason, str]:
        cause, decision = self._chain.why_missed(key), state.decision
        if cause.reason is not None:
            if cause.reason is MissReason.NOT_COMPUTED and state.is_windowed(key):
                return MissReason.NO_STATE, ""
            return cause.reason, self._told(cause)
        if decision.weighed is not None:
            load, compute = decision.weighed
            loading = f"{load:.3g} s" if load < math.inf else "longer than its load_deadline"
            return MissReason.DECLINED, f"loading: {loading}, computing: {compute:.3g} s"
        if decision.short_of_room:
            return MissReason.NO_ROOM, ""
        return MissReason.NOT_STORED, "it came after the request had been looked up"

    def _as_before(
        self, context: _Context, before: _Context, seconds: float
    ) -> tuple[MissReason, str]:
        """Nothing is known of a block, but it was computed before."""
        if before != context:
            return _difference(context, before)
        if seconds < self._chain.misses.horizon:
            return MissReason.NOT_STORED, f"computed before at {_clock_time(seconds)}"
        return MissReason.NOT_COMPUTED, "or so long ago that nothing else is remembered"

    def _told(self, cause: Cause) -> str:
        """What is known of a block's end."""
        media = [tier.medium for tier in self._chain.tiers]
        if cause.past is None:
            return "" if cause.tier is None else media[cause.tier]
        told = [self._past(cause.past, media)]
        if cause.besides is not None:
            told.append(self._past(cause.besides, media))
        return "; ".join(told)

    @staticmethod
    def _past(past: Past, media: Sequence[str]) -> str:
        verb = {
            MissReason.NOT_WRITTEN: "not written to",
            MissReason.EVICTED: "evicted from",
            MissReason.CORRUPT: "found in",
        }.get(past.fate.reason, "gone from")
        return f"{verb} {media[past.tier]} at {_clock_time(past.seconds)}, {past.fate.how}"

    # -- loads that have failed ------------------------------------------------------------------

    def load_failed(
        self,
        request: str,
        state: RequestState,
        shapes: Mapping[int, Shape],
        failed: Mapping[BlockKey, Outcome],
        *,
        late: bool,
    ) -> None:
        """The load of a request has failed: it computes what it was to load."""
        begins = {
            key: at * shapes[group].tokens
            for group, _, known in state.columns
            for at, key in enumerate(known)
        }
        blamed = [key for key, why in failed.items() if late or why is not Outcome.CANCELLED]
        key = min(blamed or failed, key=lambda each: begins.get(each, 0))
        reason = _REASON_OF.get(failed[key], MissReason.LOAD_FAILED)
        miss = Miss(request, time.time(), 0, 0, begins.get(key, 0), key=key.hex())
        end = miss.token
        before = next((each for each in reversed(self.latest) if each.request == request), None)
        if before is not None:
            end, miss.prompt_tokens = before.token, before.prompt_tokens
            miss.engine_tokens = min(before.engine_tokens, miss.tier_tokens)
            miss.tier_tokens -= miss.engine_tokens
        detail = f"its load ended with {failed[key].value}"
        self._add(miss, end, MissReason.LOAD_LATE if late else reason, detail)

    def _add(self, miss: Miss, end: int, reason: MissReason, detail: str) -> None:
        miss.missed_tokens = max(0, end - miss.token)
        miss.reason, miss.detail = reason.label, detail
        self.counts[reason][0] += 1
        self.counts[reason][1] += miss.missed_tokens
        self.latest.append(miss)
        if self._log:
            logger.info("request %s: %s", miss.request, miss.sentence)


def _clock_time(seconds: float) -> str:
    """So many seconds ago, by the clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - seconds))
