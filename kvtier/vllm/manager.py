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
from collections.abc import Callable, Collection, Mapping

import msgspec

from kvtier.chain.hits import Decision, Shape, junction
from kvtier.chain.ledger import Ticket
from kvtier.chain.plan import HOST, JOINING
from kvtier.config import Misses
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE
from kvtier.stack import Stack
from kvtier.types import BlockKey, Outcome
from kvtier.vllm.deferrals import Deferrals, LoadDeadlines
from kvtier.vllm.engine_load import EngineLoad
from kvtier.vllm.hints import Hints
from kvtier.vllm.misses import PromptFacts, RequestMisses
from kvtier.vllm.other_namespaces import OtherNamespaces
from kvtier.vllm.protocol import NO_SLOT, RecordGeometry, Report, WorkerJob
from kvtier.vllm.requests import Event, HandoverDeferral, Requests, RequestState
from kvtier.vllm.waiting_prefetches import WaitingPrefetches

logger = logging.getLogger(__name__)


class Pending(msgspec.Struct):
    """A worker job that not all ranks have reported yet."""

    request: str
    keys: list[BlockKey]
    """As the tiers know them, in the worker job's order."""
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


class ChainManager:
    """The chain in the words of vLLM's offloading manager, free of vLLM's types."""

    def __init__(
        self,
        stack: Stack,
        *,
        region: str,
        ranks: int,
        parts: int | None = None,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Records that its ranks write have so many `parts`: the namespace's, if that says it."""
        self.stack = stack
        self.chain = stack.chain
        self._region, self._ranks = region, ranks
        self.shapes: Mapping[int, Shape] = {}
        """The cache groups that are kept; until they are known, nothing is found."""
        self._clock, self.costs = clock, costs
        self._requests = Requests()
        self.load = EngineLoad(self._requests, costs, clock)
        namespace = stack.namespace
        parts = parts or namespace.parts or ranks
        self._geometry = RecordGeometry(namespace.digest, namespace.group_bytes, parts)
        self._copies = max(1, ranks // parts)
        self._load_seconds = max(tier.load_deadline.seconds for tier in stack.config.tiers)
        self._deadlines = LoadDeadlines(costs, clock, self._load_seconds)
        self._deferrals = Deferrals(self.chain, self._requests, self._deadlines, costs, clock)
        self.ahead = WaitingPrefetches(self.chain, costs, namespace.group_bytes, clock)
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._computing, self._epoch = 0, b""
        self.hints = Hints(
            self.chain, namespace, self._requests, lambda: (self.shapes, self._epoch), clock
        )
        self.other_namespaces = OtherNamespaces(stack.config, namespace)
        self.misses: RequestMisses | None = None
        if (wanted := stack.config.misses) is not Misses.IGNORE:
            elsewhere, log = self.other_namespaces.find, wanted is Misses.LOG
            self.misses = RequestMisses(self.chain, namespace, elsewhere, clock, log=log)
        self.failed_loads = self.late_loads = self.failed_stores = 0

    # -- keys ------------------------------------------------------------------------------

    def on_new_request(
        self, request: str, salt: bytes | None = b"", *, identified: bool = True
    ) -> None:
        """A request was added; `salt` stands for what its block hashes do not cover, None for what
        nobody knows. What is not `identified` yet is told later (`identify`)."""
        state = RequestState(identified=False, refused=True)
        self._requests.add(request, state)
        self.load.first_tokens.added(request)
        if identified:
            state.identify(salt)

    def identify(self, request: str, salt: bytes | None) -> None:
        """What its block hashes do not cover is known now, or nobody will know."""
        self._requests.of(request).identify(salt)

    def keep_no_more(self, request: str | None = None) -> None:
        """What there is of this request, or of all (None), may be half computed, or wrong. It may
        have ended, too, while a store of it is under way."""
        one = None if request is None else self._requests.get(request)
        for state in self._requests if request is None else [one] if one else []:
            state.kept = False

    def known_as(self, key: bytes, request: str) -> BlockKey:
        """The key by which the tiers know this one of a request's."""
        return self._requests.of(request).known_as([key], self._epoch)[0]

    # -- loads -----------------------------------------------------------------------------

    def find(self, request: str, ends: Mapping[bytes, int]) -> None:
        """Ask media that alone know what they hold, once, about the blocks of a request that came
        into the queue."""
        if not self.chain.queries.on:
            return
        state = self._requests.of(request)
        if state.query is None and state.identified and not state.refused:
            state.arrange(self.shapes, ends, self._epoch)
            state.query = self.chain.find([key for _, _, known in state.columns for key in known])

    def begin_lookup(self, request: str, start: int, limit: int, scarce: bool = True) -> None:
        """The engine is about to look up what it could load between these tokens; `scarce` if it
        may lack the blocks for it."""
        state = self._requests.of(request)
        self._requests.asked(request, scarce)
        self.load.tell()
        state.start, state.limit, state.hits, state.junction = start, limit, None, 0

    def defer(self, request: str, loading: Collection[bytes] = ()) -> None:
        """It has to wait for what is being copied (`loading` from the tiers), and will be asked
        about again."""
        self._requests.on(Event.PUT_OFF, request)
        self._deferrals.for_load(self._requests.of(request), self.shapes, loading)

    def scheduled(self, request: str, start: int = 0, stop: int = 0) -> None:
        """It has its blocks: for a load, or for tokens `start:stop`, which are computed now."""
        self._requests.scheduled(request, loads=stop <= start)
        self.ahead.left(request, served=True)
        state = self._requests.of(request)
        self.load.admitted(request, max(start, state.start), stop)
        state.deferral = state.deferred_since = state.expected = None

    def lookup(self, key: bytes, request: str, ends: Mapping[bytes, int]) -> bool | None:
        """Whether a block is here, can be taken in, and is worth its load; None if the request had
        better ask again in the next step, because others hold the room that its load takes, or
        what another engine has computed is on its way.

        vLLM asks block by block and group by group, windows from their end, in each step anew; the
        first question of a step is answered for the whole request. `ends` are the request's keys
        with the token after each, in order.
        """
        state = self._requests.of(request)
        if state.refused:
            return False
        hits = state.hits if state.hits is not None else self._answer(request, state, ends)
        return None if state.told_to_wait else key in hits

    def _answer(self, request: str, state: RequestState, ends: Mapping[bytes, int]) -> set[bytes]:
        """Decide on all of a request: its hits, and whether it waits."""
        state.arrange(self.shapes, ends, self._epoch)
        self.find(request, ends)
        state.spare, state.deferral = self.chain.reservations.spare(), None
        if state.query is not None:
            self._deferrals.for_query(request, state, self.shapes)
        if state.expected is not None and state.deferral is None:
            self._deferrals.for_handover(request, state, self.shapes)
        state.hits = self._look_up(state) if state.deferral is None else set()
        if state.deferral is None and state.decision.short_of_room and self._room_comes:
            self._deferrals.for_room(request, state, state.end(self.shapes))
        return state.hits

    def expect(self, request: str) -> None:
        """Another engine has computed its prompt: what is not here yet is on its way to a tier."""
        if self.hands_over(request):
            self._requests.of(request).expected = HandoverDeferral(self._clock())

    def hands_over(self, request: str) -> bool:
        """Whether other engines find its blocks: after a reset this one has keys of its own."""
        state = self._requests.get(request)
        return state is not None and state.kept and not self._epoch

    def still_deferred(
        self, request: str, ends: Mapping[bytes, int], loading: Collection[bytes] = ()
    ) -> bool:
        """Whether one that was told to ask again has to, before all of its keys are looked up."""
        state = self._requests.of(request)
        if state.refused or state.deferral is None:
            return False
        if self._deferrals.still_holds(request, state, loading, room_comes=self._room_comes):
            return True
        if state.told_to_wait:
            self._answer(request, state, ends)
        return state.told_to_wait

    @property
    def _room_comes(self) -> bool:
        """Whether loads or prefetches are under way, which will let go of what they hold."""
        loading = any(pending.ticket for pending in self._pending.values())
        return loading or self.chain.prefetches.holds_room

    def mark_used(self, request: str, ends: Mapping[bytes, int]) -> None:
        """Its whole prompt counts as used, once: also what the engine itself still has, which it
        does not look up here, and would find gone when it has it no more."""
        state = self._requests.of(request)
        if not (state.touched or state.refused):
            state.touched = True
            state.arrange(self.shapes, ends, self._epoch)
            if state.columns:
                sizes = self.stack.namespace.group_bytes
                self.chain.touch(state.uses(self.shapes, sizes, self.chain.locate))

    def _look_up(self, state: RequestState) -> set[bytes]:
        columns, start, limit = state.columns, state.start, state.limit
        if state.is_prefix(self.shapes):
            ((group, asked, known),) = columns
            tokens = self.shapes[group].tokens
            first, last = start // tokens, limit // tokens
            count = self.chain.match_prefix(
                known[first:last], tokens, first * tokens, state.decision
            )
            return set(asked[first : first + count])
        spans = state.spans(self.shapes, self.stack.namespace.group_bytes)
        stop, places = self.chain.match_windows(spans, start, limit, state.decision)
        state.junction = junction(spans, places, start, limit)
        hits: set[bytes] = set()
        for column, span, found in zip(columns, spans, places, strict=True):
            last = -(-stop // span.shape.tokens) if stop > start else 0
            hits.update(
                key
                for key, at in zip(column.asked[:last], found, strict=False)
                if at >= HOST or at == JOINING
            )
        return hits

    def junction(self, request: str) -> int:
        """The token at which others may part from this prompt, too: a hit could end there, were all
        that it takes kept. 0 if there is none, or that is so already."""
        return self._requests.of(request).junction

    def prepare_load(self, keys: Collection[bytes], request: str) -> WorkerJob:
        """Take blocks in for a request. Cannot refuse: what is missing fails on the worker."""
        state = self._requests.of(request)
        self.load.first_tokens.loads(request)
        state.decision = Decision()
        state.refused = True  # should this raise, the load fails, and must not be tried for ever
        wanted = state.known_as(list(keys), self._epoch)
        deadline = self._clock() + self._load_seconds
        ticket = self.chain.begin_load(state.as_it_grows(wanted), request, deadline, proves=True)
        slots = dict(zip(ticket.keys, getattr(ticket.spec, "slots", ()), strict=True))
        worker_job = self._worker_job(wanted, [slots.get(key, NO_SLOT) for key in wanted], deadline)
        files = ticket.files
        worker_job.files = {at: files[key] for at, key in enumerate(wanted) if key in files}
        self._pending[worker_job.number] = Pending(request, wanted, self._ranks, ticket)
        lower = ticket.lower_tiers()
        if not lower and self.costs is not None:
            sizes = map(self.stack.namespace.payload_of, wanted)
            self.costs.started(DEVICE, worker_job.number, sum(sizes))
        if lower and state.columns:
            self._deadlines.began(
                worker_job.number,
                ticket.due,
                *state.hangs_on(self.shapes, wanted, lower),
                left=self._left_of(ticket, set(lower.values())),
                query=state.query,
            )
        state.sources = {
            asked: lower.get(key, HOST) for asked, key in zip(keys, wanted, strict=True)
        }
        state.refused = False
        return worker_job

    def _left_of(self, ticket: Ticket, origins: set[int]) -> Callable[[], int] | None:
        """Tells how many blocks of a load have not come yet, if all of it is other machines'."""
        tiers = self.chain.tiers
        if not (self.chain.queries.on and all(tiers[at].finds for at in origins)):
            return None
        return lambda: len(ticket.pending) - len(tiers[HOST].arrived(list(ticket.pending)))

    def source_of(self, key: bytes, request: str) -> int:
        """The tier that a block of a request's load comes from."""
        return self._requests.of(request).sources.get(key, HOST)

    def explain(self, request: str, loads: int, prompt: Callable[[], PromptFacts]) -> None:
        """It loads so many tokens, and computes the rest: note why, the first time."""
        state = self._requests.get(request)
        if self.misses is None or state is None or state.explained or not state.looked_up:
            return
        self.misses.explain(request, state, self.shapes, loads, prompt(), self._epoch)

    # -- stores ----------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[bytes], request: str) -> tuple[list[bytes], WorkerJob]:
        """Room for those of the keys that are new and can be taken, in their order."""
        state = self._requests.of(request)
        offered = list(keys) if state.kept and state.identified else []
        wanted = state.known_as(offered, self._epoch)
        reservation = self.chain.prepare_store(state.as_it_grows(wanted))
        grown = reservation.keys
        slots = dict(zip(grown, getattr(reservation.spec, "slots", ()), strict=True))
        mine = [key for key, known in zip(offered, wanted, strict=True) if known in slots]
        taken = [known for known in wanted if known in slots]
        worker_job = self._worker_job(taken, [slots[key] for key in taken], float("inf"))
        if mine:
            self._pending[worker_job.number] = Pending(request, taken, self._ranks, grown=grown)
        return mine, worker_job

    def _worker_job(self, keys: list[BlockKey], slots: list[int], deadline: float) -> WorkerJob:
        number = next(self._numbers)
        return WorkerJob(number, self._region, self._geometry, keys, slots, deadline)

    # -- reports ---------------------------------------------------------------------------

    def report(self, number: int, report: Report) -> str | None:
        """What ranks say of a worker job; names the request if its load has now failed."""
        pending = self._pending.get(number)
        merged = pending.merge(report) if pending is not None else None
        if pending is None or merged is None:
            return None
        del self._pending[number]
        if self.costs is not None:
            self.costs.observe_memory(merged.pinned)
        given_up = self._deadlines.ended(number)
        self.chain.read_directly(merged.reads_files)
        failed = pending.failed(merged) if merged.failures else {}
        if pending.ticket is None:
            if pending.distrusted:
                failed = dict.fromkeys(pending.keys, Outcome.DROPPED)
            self.failed_stores += len(failed)
            self.chain.complete_store(pending.grown, failed)
            return None
        if self._end_load(number, pending.ticket, merged, failed):
            return None
        late = given_up and set(failed.values()) == {Outcome.CANCELLED}
        self._recompute(pending, failed, late)
        return pending.request

    def distrust_stores(self) -> None:
        """Keep nothing that is being stored: another connector has not loaded what the engine took
        for loaded, and all that is under way may have been computed from it."""
        for pending in self._pending.values():
            pending.distrusted = pending.ticket is None

    def _end_load(
        self, number: int, ticket: Ticket, report: Report, failed: dict[BlockKey, Outcome]
    ) -> bool:
        """Let go of what a load held, and learn from it; whether all of it has come."""
        taken = set(ticket.keys)
        # CANCELLED says that another block of the load failed, TIMEOUT that this one was late:
        # neither says that the block itself is bad.
        blamed = {
            key: outcome
            for key, outcome in failed.items()
            if (outcome in (Outcome.CORRUPT, Outcome.GONE, Outcome.IO_ERROR) and key in taken)
            or key in ticket.files
        }
        # Ranks that hold the same have each read all of it.
        moved, read = (n // self._copies for n in (report.bytes_moved, report.bytes_read))
        self.chain.end_load(ticket, blamed, (read, report.read_seconds), taken - failed.keys())
        if self.costs is not None:
            size = 0 if failed else moved - read
            self.costs.ended(DEVICE, number, not failed, report.busy_seconds, size)
        return not failed

    def _recompute(self, pending: Pending, failed: dict[BlockKey, Outcome], late: bool) -> None:
        """Offer a request nothing any more, or, if its load was only `late`, what has come."""
        state = self._requests.get(pending.request)
        pending.tell_of_loss(failed.values(), late)
        self.late_loads += late
        self.failed_loads += not late
        if state is not None and self.misses is not None:
            self.misses.load_failed(pending.request, state, self.shapes, failed, late=late)
        if state is not None:
            state.refused = not late
            state.decision = Decision(at_hand=late)

    # -- the engine's steps ----------------------------------------------------------------

    def on_schedule_end(self) -> None:
        """Once a step: collect what the mover has done, start what is next."""
        self.chain.poll()
        if not self._requests.short_of_room:
            self.ahead.step(self._requests, self.shapes, self._epoch)
            self.hints.step()
        if self.misses is not None:
            self.misses.step(self._computing)

    def step_began(self, tokens: int, context: int, each: Mapping[str, int] = {}) -> None:
        """The engine computes so many prompt tokens now, after so many others; and of each."""
        self.load.stepped(each)
        self.load.pace.began(tokens, context)
        self._computing = tokens

    def give_up(self) -> int | None:
        """The job of a load that is not worth waiting for any longer, if there is one."""
        return self._deadlines.give_up(self._computing > 0 or self._requests.anybody_waits)

    def on_request_finished(self, request: str) -> None:
        """The request asks for nothing any more; its worker jobs may still be under way."""
        self._requests.remove(request)
        self.hints.gone(request)
        self.ahead.left(request, served=False)
        self.load.gone(request)

    @property
    def copying(self) -> bool:
        """Whether workers have not reported all worker jobs."""
        return bool(self._pending)

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed although no request is scheduled."""
        explaining = self.misses is not None and self.misses.pending
        return self.copying or self.chain.has_pending_work or self.hints.pending or explaining

    @property
    def idle(self) -> bool:
        """Whether nobody asks for anything, and nothing is under way."""
        return not (len(self._requests) or self.has_pending_work)

    def reset(self, keep: bool = False) -> None:
        """The engine's weights may have changed: nothing stored so far is served any more. Or it
        only pauses, and all is to be kept but what is being stored: its memory may go amid that.

        New keys are not found by who starts with the weights on disk. Nothing is kept of requests
        that are there: it may be of both weights, and vLLM offers even what windows have left.
        """
        if keep:
            self.distrust_stores()
        else:
            self._epoch = os.urandom(16)
            self.chain.clear()
            self.ahead.forget()
            self.hints.forget()
            logger.info("cache reset: all tiers are empty, and later blocks are for this run only")
        for state in self._requests:
            state.positions, state.kept = -1, False
            state.hits = state.deferral = state.expected = None

    def close(self) -> None:
        """Close the stack."""
        self.other_namespaces.close()
        self.stack.close()
