"""The scheduler's side: answers vLLM's questions from the chain, and takes the workers' reports.

What vLLM calls here runs on its scheduler thread: nothing blocks, nothing raises. Blocks become
visible, and pins are released, when the workers' own reports say so (`report`), not when vLLM
believes its job done: a job can fail, and after a reset vLLM does not mention it any more.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import xxhash

from kvtier.core.costs import DEVICE, CostModel
from kvtier.core.flight import Ticket
from kvtier.stack import Stack
from kvtier.types import GROUP_BYTES, BlockKey, Outcome, Presence
from kvtier.vllm.pace import Pace
from kvtier.vllm.protocol import NO_SLOT, Errand, Geometry, Report

logger = logging.getLogger(__name__)


class RequestState(msgspec.Struct):
    """What is known of one of the engine's requests."""

    salt: bytes = b""
    """Mixed into its keys, if not empty: what vLLM's own hash leaves out."""
    touched: set[bytes] = msgspec.field(default_factory=set)
    """The groups whose blocks the tiers know to be asked for: they count it once a request."""
    refused: bool = False
    """A load has failed: the rest of this request is recomputed."""
    asked_at: int = -1
    """The step in which `hits` were found."""
    hits: set[bytes] = msgspec.field(default_factory=set)
    groups: set[int] = msgspec.field(default_factory=set)


class Pending(msgspec.Struct):
    """An errand that not all ranks have reported yet."""

    request: str
    keys: list[BlockKey]
    """As the tiers know them, in the errand's order."""
    left: int
    ticket: Ticket | None = None
    """Of a load; None for a store."""
    report: Report = msgspec.field(default_factory=lambda: Report(0))


class Positions:
    """The keys of a request, in the order of its tokens, group by group."""

    def __init__(self, ends: Mapping[bytes, int]) -> None:
        self._ends = ends

    def from_key(self, key: bytes) -> list[bytes]:
        """The keys of this key's group from it on; only itself where vLLM knows no order."""
        group = key[-GROUP_BYTES:]
        mine = [each for each in self._ends if each[-GROUP_BYTES:] == group]
        try:
            return mine[mine.index(key) :]
        except ValueError:
            return [key]

    def group(self, key: bytes) -> list[bytes]:
        """All keys of this key's group."""
        group = key[-GROUP_BYTES:]
        return [each for each in self._ends if each[-GROUP_BYTES:] == group]

    def end(self, key: bytes) -> int:
        """The token after a key's last one; 0 if it is not known."""
        return self._ends.get(key, 0)


class ChainManager:
    """The chain in the words of vLLM's offloading manager, free of vLLM's types."""

    def __init__(
        self,
        stack: Stack,
        *,
        region: str,
        ranks: int,
        chunk_tokens: int,
        groups: int,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack = stack
        self.chain = stack.chain
        self._region = region
        self._ranks = ranks
        self._chunk_tokens = chunk_tokens
        self._single = groups == 1
        self._clock = clock
        self._costs = costs
        self._pace = Pace(costs, clock) if costs is not None else None
        namespace = stack.namespace
        self._geometry = Geometry(namespace.digest, namespace.group_bytes, namespace.parts)
        self._load_seconds = max(tier.load_deadline.seconds for tier in stack.config.tiers)
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._requests: dict[str, RequestState] = {}
        self._epoch = b""
        self._step = 0
        self.failed_loads = 0
        self.failed_stores = 0

    # -- keys ------------------------------------------------------------------------------

    def on_new_request(self, request: str, salt: bytes = b"") -> None:
        """A request was added; `salt` stands for what its block hashes do not cover."""
        self._requests[request] = RequestState(salt=salt)

    def _state(self, request: str) -> RequestState:
        state = self._requests.get(request)
        if state is None:
            state = self._requests[request] = RequestState()
        return state

    def _known_as(self, keys: Sequence[bytes], state: RequestState) -> list[BlockKey]:
        """The keys as the tiers know them: with the request's salt and the epoch in them."""
        salt = self._epoch + state.salt
        if not salt:
            return [BlockKey(key) for key in keys]
        digest = xxhash.xxh3_128_digest
        return [BlockKey(digest(salt + key) + key[-GROUP_BYTES:]) for key in keys]

    # -- loads -----------------------------------------------------------------------------

    def lookup(self, key: bytes, request: str, positions: Positions) -> bool:
        """Whether a block is here, can be taken in, and is worth its load.

        vLLM asks block by block, in each step anew; the first question of a step is answered for
        the whole rest of the request.
        """
        state = self._state(request)
        if state.refused:
            return False
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        if state.asked_at != self._step:
            state.asked_at = self._step
            state.hits = set()
            state.groups = set()
        if group not in state.groups:
            state.groups.add(group)
            self._look_up_group(key, state, positions)
        return key in state.hits

    def _look_up_group(self, key: bytes, state: RequestState, positions: Positions) -> None:
        everything = positions.group(key)
        if everything and key[-GROUP_BYTES:] not in state.touched:
            state.touched.add(key[-GROUP_BYTES:])
            self.chain.touch(self._known_as(everything, state))
        if self._single:
            asked = positions.from_key(key)
            start = max(0, positions.end(key) - self._chunk_tokens)
            count = self.chain.worth(self._known_as(asked, state), self._chunk_tokens, start)
            state.hits.update(asked[:count])
        else:  # windows are looked up backwards, so there is no leading run to weigh
            asked = everything if key in everything else [key]
            found = self.chain.lookup(self._known_as(asked, state))
            state.hits.update(
                each for each, at in zip(asked, found, strict=True) if at is Presence.HIT
            )

    def prepare_load(self, keys: Collection[bytes], request: str) -> Errand:
        """Take blocks in for a request. Cannot refuse: what is missing fails on the worker."""
        state = self._state(request)
        wanted = self._known_as(list(keys), state)
        deadline = self._clock() + self._load_seconds
        ticket = self.chain.begin_load(wanted, request, deadline)
        slots = dict(zip(ticket.keys, getattr(ticket.spec, "slots", ()), strict=True))
        errand = self._errand(wanted, [slots.get(key, NO_SLOT) for key in wanted], deadline)
        errand.files = {
            at: ticket.files[key] for at, key in enumerate(wanted) if key in ticket.files
        }
        self._pending[errand.number] = Pending(request, wanted, self._ranks, ticket)
        return errand

    def source_of(self, key: bytes, request: str) -> int:
        """The tier that a block would come from; a negative number if from none."""
        (known,) = self._known_as([key], self._state(request))
        return self.chain.locate([known])[0]

    # -- stores ----------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], request: str) -> tuple[list[bytes], Errand]:
        """Room for those of the keys that are new and can be taken, in their order."""
        offered = list(keys)
        wanted = self._known_as(offered, self._state(request))
        reservation = self.chain.prepare_store(wanted)
        taken = set(reservation.keys)
        mine = [key for key, known in zip(offered, wanted, strict=True) if known in taken]
        slots = list(getattr(reservation.spec, "slots", ()))
        errand = self._errand(reservation.keys, slots, float("inf"))
        if mine:
            self._pending[errand.number] = Pending(request, reservation.keys, self._ranks)
        return mine, errand

    def _errand(self, keys: list[BlockKey], slots: list[int], deadline: float) -> Errand:
        number = next(self._numbers)
        return Errand(number, self._region, self._geometry, keys, slots, deadline)

    # -- reports ---------------------------------------------------------------------------

    def report(self, number: int, report: Report) -> str | None:
        """What ranks say of an errand; names the request if its load has now failed."""
        pending = self._pending.get(number)
        if pending is None:
            return None
        pending.report = pending.report.merge(report)
        pending.left -= report.ranks
        if pending.left > 0:
            return None
        del self._pending[number]
        self.chain.read_directly(pending.report.reads_files)
        failed = {
            pending.keys[index]: outcome
            for index, outcome in pending.report.failures.items()
            if index < len(pending.keys)
        }
        if pending.ticket is None:
            self.failed_stores += len(failed)
            self.chain.complete_store(pending.keys, failed)
            return None
        return self._end_load(pending, pending.ticket, failed)

    def _end_load(
        self, pending: Pending, ticket: Ticket, failed: dict[BlockKey, Outcome]
    ) -> str | None:
        taken = set(ticket.keys)
        # CANCELLED says that another block of the load failed, TIMEOUT that this one was late:
        # neither says that the block itself is bad.
        blamed = {
            key: outcome
            for key, outcome in failed.items()
            if (outcome in (Outcome.CORRUPT, Outcome.GONE, Outcome.IO_ERROR) and key in taken)
            or key in ticket.files
        }
        report = pending.report
        self.chain.end_load(ticket, blamed, (report.bytes_read, report.read_seconds))
        if not failed:
            if self._costs is not None:
                by_host = report.bytes_moved - report.bytes_read
                self._costs.observe_load(DEVICE, by_host, report.busy_seconds)
            return None
        self.failed_loads += 1
        logger.warning(
            "a load of %d blocks for request %s failed (%s): it is recomputed",
            len(pending.keys),
            pending.request,
            ", ".join(sorted({outcome.value for outcome in failed.values()})),
        )
        if pending.request in self._requests:
            self._requests[pending.request].refused = True
        return pending.request

    # -- the engine's steps ----------------------------------------------------------------

    def on_schedule_end(self) -> None:
        """Once a step: collect what the mover has done, start what is next."""
        self._step += 1
        self.chain.poll()

    def step_began(self, tokens: int, context: int) -> None:
        """The engine computes so many prompt tokens now, after so many others."""
        if self._pace is not None:
            self._pace.began(tokens, context)

    def step_ended(self) -> None:
        """The oldest step that began has ended."""
        if self._pace is not None:
            self._pace.ended()

    def on_request_finished(self, request: str) -> None:
        """The request asks for nothing any more; its errands may still be under way."""
        self._requests.pop(request, None)

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed although no request is scheduled."""
        return bool(self._pending) or self.chain.has_pending_work

    def reset(self) -> None:
        """The engine's weights may have changed: nothing stored so far is served any more.

        A new epoch in all keys from now on: what this process stores will not be found by one that
        starts with the weights on disk, which may be others.
        """
        self._epoch = os.urandom(16)
        self.chain.clear()
        for state in self._requests.values():
            state.asked_at = -1
        logger.info("cache reset: all tiers were emptied, and later blocks are for this run only")

    def close(self) -> None:
        """Close the stack."""
        self.stack.close()
