"""Why requests found less than their prompts: the first token of which nothing was found, and the
reason.

The chain knows what became of a block by its key. Which other salt, adapter or weights a prompt was
computed for cannot be seen from keys: so prompts are remembered by their tokens alone, too. Both
are bounded, and what was forgotten looks like what was never computed. Tokens are hashed in pieces,
some in each step, so that no step takes noticeably longer for a long prompt.
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
PIECE = 2048
"""So many tokens of prompts are hashed in a step, or as many as the step before has computed."""
_WAITING_MAX = 1 << 20
"""Tokens of prompts that wait to be hashed."""
_LOOK = 64
"""Blocks that are looked for at once: most misses are among the first."""
_PROMPT_ROWS, _CONTEXTS_MAX, _ENDS_MAX = 1 << 17, 1 << 14, 1 << 12
_REASON_OF = {
    Outcome.CORRUPT: MissReason.CORRUPT,
    Outcome.GONE: MissReason.EVICTED,
    Outcome.TIMEOUT: MissReason.LOAD_LATE,
}
_BY_LABEL = {reason.label: reason for reason in MissReason}


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
        detail = f" ({self.detail})" if self.detail else ""
        sentence = _BY_LABEL[self.reason].sentence
        return f"{found}; {self.missed_tokens} missed from there on: {sentence}{detail}"


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
        self._ends: dict[BlockKey, int] = {}
        """The digests of prompts that were hashed last, by their last blocks."""
        self._forget()

    def _forget(self) -> None:
        self._ring = HashRing(_PROMPT_ROWS)
        self._contexts: list[_Context] = []
        self._numbers: dict[_Context, int] = {}

    def known_part(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """How many of these leading blocks were hashed already, and the digest up to there."""
        for count in range(len(keys), 0, -1):
            if (digest := self._ends.get(keys[count - 1])) is not None:
                return count, digest
        return 0, 0

    def go_on(self, hashing: _Hashing, tokens: int) -> int:
        """Hash about so many tokens more of a prompt that is being computed, and remember its
        missing chunks; how many tokens it were."""
        begin, digests = hashing.at, hashing.go_on(tokens)
        number, now = self._number(hashing.context), self._clock() - self._began
        fresh = digests[max(0, hashing.first - begin) :]
        if begin <= hashing.first < hashing.at:
            for fact, at in self._ring.find(fresh[0]):
                hashing.before = (self._contexts[fact], now - at)
                break
        opens = begin == 0 < hashing.first
        if opens and all(fact != number for fact, _ in self._ring.find(digests[0])):
            fresh = [digests[0], *fresh]
        self._ring.add(np.array(fresh, np.uint64), number, now)
        if not hashing.left and hashing.last is not None:
            self._ends[hashing.last] = digests[-1]
            if len(self._ends) > _ENDS_MAX:
                del self._ends[next(iter(self._ends))]
        return len(digests) * hashing.step

    def _number(self, context: _Context) -> int:
        number = self._numbers.get(context)
        if number is None:
            if len(self._contexts) >= _CONTEXTS_MAX:
                self._forget()
            number = self._numbers[context] = len(self._contexts)
            self._contexts.append(context)
        return number


class _Hashing:
    """A prompt on its way to digests, each of all tokens up to the end of a chunk."""

    def __init__(
        self,
        tokens: Sequence[int],
        context: _Context,
        step: int,
        stop: int,
        first: int,
        keys: Sequence[BlockKey],
        known: tuple[int, int],
    ) -> None:
        """Up to this token. `first` is the first missing chunk; before it so many are `known`, with
        their digest. `keys` are the chunks' blocks, if each has one."""
        self._tokens, self._chunks = tokens, min(stop, len(tokens)) // step
        self.context, self.step, self.first = context, step, first
        self.at, self._digest = known
        """So many chunks are hashed."""
        self.last = keys[self._chunks - 1] if 0 < self._chunks <= len(keys) else None
        """The block of the last chunk."""
        self.before: tuple[_Context, float] | None = None
        """Where the first missing chunk was computed before, and how many seconds ago."""

    @property
    def left(self) -> int:
        """Tokens that are not hashed yet."""
        return (self._chunks - self.at) * self.step if self.first < self._chunks else 0

    def go_on(self, tokens: int) -> list[int]:
        """Hash so many tokens more, and at least a chunk."""
        digests, step = [], self.step
        for at in range(self.at, min(self.at + max(1, tokens // step), self._chunks)):
            chunk = msgspec.msgpack.encode(self._tokens[at * step : (at + 1) * step])
            self._digest = xxhash.xxh3_64_intdigest(chunk, self._digest)
            digests.append(self._digest)
        self.at += len(digests)
        return digests


class _Unexplained(NamedTuple):
    """A miss of which only its prompt's tokens can say more."""

    miss: Miss
    hashing: _Hashing
    missing: Sequence[BlockKey]
    """Blocks from the first missing one on."""


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
        self._waiting: deque[_Unexplained] = deque()
        self._waiting_tokens = 0
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
            self._note(miss, end, MissReason.UNTRUSTED, "")
            self._count(miss)
            return
        key = self._first_missing(state, shapes, found, end)
        miss.key = key.hex()
        self._note(miss, end, *self._reason(state, key))
        first, keys = found // step, state.columns[0].known if state.is_prefix(shapes) else []
        context = _Context(epoch, hash(prompt.salt) if prompt.salt else 0, prompt.adapter)
        known = self._prompts.known_part(keys[:first])
        hashing = _Hashing(prompt.tokens, context, step, end, first, keys, known)
        unexplained = _Unexplained(miss, hashing, keys[first:] or [key])
        room = not self._waiting or self._waiting_tokens + hashing.left <= _WAITING_MAX
        if hashing.left and room:
            self._waiting.append(unexplained)
            self._waiting_tokens += hashing.left
        else:
            self._end(unexplained)

    @property
    def pending(self) -> bool:
        """Whether a prompt waits to be hashed."""
        return bool(self._waiting)

    def step(self, computed: int) -> None:
        """Once a step: hash some of the prompts that wait, about as many tokens as the step before
        has `computed`, which takes a hundredth of its time at most."""
        left = max(PIECE, computed)
        while self._waiting and left > 0:
            unexplained = self._waiting.popleft()  # it does not come again if this should raise
            hashing = unexplained.hashing
            self._waiting_tokens -= hashing.left
            left -= self._prompts.go_on(hashing, left)
            if hashing.left:
                self._waiting.appendleft(unexplained)
                self._waiting_tokens += hashing.left
            else:
                self._end(unexplained)

    def _end(self, unexplained: _Unexplained) -> None:
        """All is known that ever will be of a miss."""
        miss, hashing, missing = unexplained
        unknown = MissReason.NOT_COMPUTED.label
        if miss.reason == unknown and hashing.before is not None:
            self._say(miss, *self._as_before(hashing.context, *hashing.before))
        if miss.reason == unknown and (facts := self._elsewhere(missing)) is not None:
            self._say(miss, MissReason.OTHER_NAMESPACE, facts)
        self._count(miss)

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
        for start in range(0, len(keys), _LOOK):
            some = keys[start : start + _LOOK]
            if (count := leading(self._chain.locate(some))) < len(some):
                return start + count
        return len(keys)

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
        self._note(miss, end, MissReason.LOAD_LATE if late else reason, detail)
        self._count(miss)

    def _note(self, miss: Miss, end: int, reason: MissReason, detail: str) -> None:
        miss.missed_tokens = max(0, end - miss.token)
        self._say(miss, reason, detail)
        self.latest.append(miss)

    @staticmethod
    def _say(miss: Miss, reason: MissReason, detail: str) -> None:
        miss.reason, miss.detail = reason.label, detail

    def _count(self, miss: Miss) -> None:
        counts = self.counts[_BY_LABEL[miss.reason]]
        counts[0] += 1
        counts[1] += miss.missed_tokens
        if self._log:
            logger.info("request %s: %s", miss.request, miss.sentence)


def _clock_time(seconds: float) -> str:
    """So many seconds ago, by the clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - seconds))
