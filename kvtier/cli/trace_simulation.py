"""What a stack would have served of a trace of requests: hits by tier, bytes moved, wear.

Every tier has a real eviction policy and is told of requests as a running stack tells it. What is
left out is time: a store or load is done before the next request comes. `read_trace` reads a trace,
`simulate_all` runs it on all cores.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.chain.store import TOUCHES_KEPT, Touches
from kvtier.cli.signals import ENDING
from kvtier.core.wear.dynamic_admission import SPREAD_S, DynamicAdmission
from kvtier.core.wear.token_bucket import BURST_S, TokenBucket
from kvtier.errors import ConfigError, KVTierError
from kvtier.eviction import UNKNOWN, EvictionPolicy, create_policy
from kvtier.settings import Admission, WritePolicy
from kvtier.system.disk import read_bounded
from kvtier.types import BlockKey

_BLOCK_MAX = 1 << 63
_BYTES_MAX = 1 << 30
_LINE_FORM = '{"timestamp": 27000, "hash_ids": [0, 1, 2]}'

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Request(NamedTuple):
    """When, in seconds, and the numbers of the prompt's blocks, the head of the prefix first."""

    time: float
    blocks: tuple[int, ...]


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Read a trace in the form of the Mooncake traces: a JSON object a line, with the `timestamp`
    in milliseconds and the `hash_ids` of the prompt's blocks; other fields are not looked at."""
    try:
        lines = read_bounded(path, _BYTES_MAX).splitlines()
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", "name the file of a trace"
        ) from error
    decoder = msgspec.json.Decoder(_Line)
    requests: list[Request] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number}", f"no request of a trace: {error}", f"like {_LINE_FORM}"
            ) from error
        blocks = tuple(dict.fromkeys(line.hash_ids))
        if blocks and not 0 <= min(blocks) <= max(blocks) < _BLOCK_MAX:
            raise ConfigError(
                f"{path}:{number}", "a block number is out of range", "use 0 to 2**63 - 1"
            )
        requests.append(Request(line.timestamp / 1000, blocks))
    if not requests:
        raise ConfigError(str(path), "holds no request", f"write lines like {_LINE_FORM}")
    requests.sort(key=lambda request: request.time)
    return requests


class TierPlan(msgspec.Struct, frozen=True):
    """One tier of the simulated stack; capacity in blocks of the trace."""

    kind: str
    blocks: int
    eviction: str
    write: WritePolicy
    admission: Admission
    remembers: int = TOUCHES_KEPT
    """So many blocks second_touch remembers, and as many more as the tier above holds."""
    writes: float | None = None
    """Blocks a second that may be written in the long run; None: as many as come."""


class TierResult(msgspec.Struct):
    """What one tier did, in blocks of the trace."""

    kind: str
    blocks: int
    hits: int = 0
    """Blocks served from here because no tier above had them."""
    written: int = 0
    evicted: int = 0


class Simulation(msgspec.Struct):
    """What a stack did with a trace."""

    references: int
    tiers: list[TierResult]

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers)


class _Budget:
    """What may be written to one simulated tier, and which blocks are worth it."""

    def __init__(self, plan: TierPlan, rate: float, start: float) -> None:
        self._bucket = TokenBucket(rate, BURST_S * rate, SPREAD_S * rate, start)
        self._admission = DynamicAdmission(plan.remembers)

    def request(self, time: float, keys: Sequence[bytes], above: Sequence[bool]) -> None:
        """A request uses these, each of which host memory has, or not."""
        self._bucket.fill(time)
        self._admission.earned.request([BlockKey(key) for key in keys], above)

    def select(self, time: float, keys: Sequence[bytes]) -> set[bytes]:
        """Those of what is offered that are to be written, if they are written now."""
        offered = [BlockKey(key) for key in keys]
        return set(self._admission.select(offered, self._bucket.level, time))

    def admitted(self, keys: Sequence[bytes]) -> set[bytes]:
        """As `select`, of what was offered before."""
        return set(self._admission.admitted([BlockKey(key) for key in keys]))

    @property
    def left(self) -> int:
        """So many blocks may be written now."""
        return max(0, int(self._bucket.level))

    def wrote(self, blocks: int) -> None:
        """So many were."""
        self._bucket.charge(blocks)


class _Tier:
    """The catalogue of one simulated tier, through which no more blocks come than `distinct`."""

    def __init__(self, plan: TierPlan, distinct: int, start: float = 0.0) -> None:
        room = min(plan.blocks, distinct)
        self.plan = plan
        self.result = TierResult(plan.kind, plan.blocks)
        self.slot_of: dict[int, int] = {}
        self.here = bytearray()
        """For every block of every request so far, whether it was here when it was asked for."""
        self._block_at = [0] * room
        self._free = list(range(room - 1, -1, -1))
        self._policy: EvictionPolicy = create_policy(plan.eviction, room)
        second = plan.admission is Admission.SECOND_TOUCH
        self._touches = Touches(plan.remembers) if second else None
        self._budget = None if plan.writes is None else _Budget(plan, plan.writes, start)

    def request(
        self,
        time: float,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        above: Sequence[bool] = (),
    ) -> list[int]:
        """Use what is here, and take in what is new if it comes this way; what was evicted.
        `above` says of each block whether host memory had it."""
        slot_of = self.slot_of
        if self._budget is not None:
            self._budget.request(time, keys, above)
        here = bytes(map(slot_of.__contains__, blocks))
        self.here += here
        count = here.find(0)
        if count < 0:
            count = len(blocks)
        slots = [slot_of[block] for block in blocks[:count]]
        wanted: Sequence[int] = self._wanted(time, blocks, keys, count)
        if slots:
            self._policy.use(slots, keys[:count], time, ahead=len(wanted))
        if not wanted:
            return []
        after = slots[-1] if slots else UNKNOWN
        if len(wanted) == len(blocks) - count:
            return self.take(time, wanted, keys[count:], after, slots, 1 in here[count:])
        name_of = dict(zip(blocks, keys, strict=True))
        return self.take(time, wanted, [name_of[block] for block in wanted], after, slots)

    def _wanted(
        self, time: float, blocks: Sequence[int], keys: Sequence[bytes], first: int
    ) -> Sequence[int]:
        """Of a request's blocks from `first` on, those that this tier takes in or holds."""
        wanted = blocks[first:]
        if self._touches is not None:
            again = set(self._touches.note([BlockKey(key) for key in keys]))
            named = zip(wanted, keys[first:], strict=True)
            wanted = [block for block, key in named if key in again or block in self.slot_of]
        if self._budget is not None:
            wanted = self._affordable(time, wanted, keys[first:])
        if self.plan.write is not WritePolicy.THROUGH:
            wanted = [block for block in wanted if block in self.slot_of]
        return wanted[: max(0, self.plan.blocks - first)]

    def _affordable(
        self, time: float, wanted: Sequence[int], keys: Sequence[bytes]
    ) -> Sequence[int]:
        """Those of the wanted blocks that are here, or that the budget is best spent on."""
        assert self._budget is not None
        here = self.slot_of
        fresh = [key for block, key in zip(wanted, keys, strict=False) if block not in here]
        worthy = self._budget.select(time, fresh)
        left, kept = self._budget.left, []
        for block, key in zip(wanted, keys, strict=False):
            if block in here:
                kept.append(block)
            elif key in worthy and left:
                kept.append(block)
                left -= 1
        return kept

    def catch(self, time: float, evicted: Sequence[int], name_of: Mapping[int, bytes]) -> list[int]:
        """Take in what the tier above evicts, if it is to come here; what had to go for it."""
        left = [block for block in evicted if block not in self.slot_of]
        if self._touches is not None:
            twice = set(self._touches.twice([BlockKey(name_of[block]) for block in left]))
            left = [block for block in left if name_of[block] in twice]
        if self._budget is not None:
            worthy = self._budget.admitted([name_of[block] for block in left])
            left = [block for block in left if name_of[block] in worthy][: self._budget.left]
        return self.take(time, left, [name_of[block] for block in left])

    def take(
        self,
        time: float,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        after: int = UNKNOWN,
        pinned: Sequence[int] = (),
        some_held: bool = True,
    ) -> list[int]:
        """Store blocks, those that are here already used; what had to go for them."""
        slot_of, block_at, free = self.slot_of, self._block_at, self._free
        blocks = blocks[: self.plan.blocks]
        held: list[int] = []
        new = blocks
        if some_held:
            held = [slot_of[block] for block in blocks if block in slot_of]
            new = [block for block in blocks if block not in slot_of]
        gone: list[int] = []
        if len(new) > len(free):
            freed = self._policy.evict(len(new) - len(free), {*pinned, *held})
            gone = [block_at[slot] for slot in freed]
            for block in gone:
                del slot_of[block]
            free += freed
            self.result.evicted += len(freed)
        fresh = free[: -len(new) - 1 : -1]
        del free[len(free) - len(fresh) :]
        for slot, block in zip(fresh, new, strict=False):
            slot_of[block] = slot
            block_at[slot] = block
        self.result.written += len(fresh)
        if self._budget is not None:
            self._budget.wrote(len(fresh))
        landed = fresh
        if held or len(fresh) < len(new):
            landed = self._landed(blocks)
        self._policy.use(landed, keys[: len(landed)], time, after=after)
        return gone

    def _landed(self, blocks: Sequence[int]) -> list[int]:
        """The slots of the first of these blocks, up to one that there was no room for."""
        slots = []
        for block in blocks:
            slot = self.slot_of.get(block, UNKNOWN)
            if slot == UNKNOWN:
                break
            slots.append(slot)
        return slots


class Trace:
    """Requests as a simulation takes them: with the keys of their blocks, all made beforehand."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        every = set(chain.from_iterable(request.blocks for request in requests))
        name_of = {block: block.to_bytes(8, "big") for block in every}
        self.keys = [[name_of[block] for block in request.blocks] for request in requests]
        self.name_of = name_of
        self.ends = np.cumsum([len(request.blocks) for request in requests], dtype=np.int64)

    @property
    def references(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def seconds(self) -> float:
        return self.requests[-1].time - self.requests[0].time if self.requests else 0.0

    @property
    def distinct(self) -> int:
        """An upper bound of how many blocks there are."""
        return len(self.name_of)

    def seen_before(self) -> NDArray[np.bool_]:
        """For every block of every request, whether a request before it asked for it."""
        blocks = chain.from_iterable(request.blocks for request in self.requests)
        flat = np.fromiter(blocks, dtype=np.int64, count=self.references)
        seen = np.ones(len(flat), dtype=np.bool_)
        seen[np.unique(flat, return_index=True)[1]] = False
        return seen


def groups_of(plans: Sequence[TierPlan]) -> list[tuple[TierPlan, ...]]:
    """The tiers that must be simulated together: one that takes what is evicted from above, or
    learns from what is missed there, with all above it. All others go their own way, whatever the
    other tiers hold."""
    bound = (
        at
        for at, plan in enumerate(plans)
        if plan.write is WritePolicy.ON_EVICT or plan.writes is not None
    )
    last = max(bound, default=0)
    return [tuple(plans[: last + 1]), *((plan,) for plan in plans[last + 1 :])]


class GroupResult(msgspec.Struct):
    """What the tiers of one group did: their counts, and which blocks they had at each request."""

    tiers: list[TierResult]
    here: list[bytes]


def run_group(trace: Trace, plans: Sequence[TierPlan]) -> GroupResult:
    """Run a trace through tiers that belong together."""
    if len(plans) == 1 and _holds_all(trace, plans[0]):
        here = trace.seen_before()
        written = len(here) - int(here.sum())
        return GroupResult(
            [TierResult(plans[0].kind, plans[0].blocks, written=written)], [here.tobytes()]
        )
    start = trace.requests[0].time if trace.requests else 0.0
    tiers = [_Tier(plan, trace.distinct, start) for plan in plans]
    for (time, blocks), keys in zip(trace.requests, trace.keys, strict=True):
        evicted: list[int] = []
        in_memory = list(map(tiers[0].slot_of.__contains__, blocks))
        for tier in tiers:
            gone = tier.request(time, blocks, keys, in_memory)
            if evicted and tier.plan.write is WritePolicy.ON_EVICT:
                gone += tier.catch(time, evicted, trace.name_of)
            if tier.plan.write is not WritePolicy.NEVER:
                evicted = gone
    return GroupResult([tier.result for tier in tiers], [bytes(tier.here) for tier in tiers])


def _holds_all(trace: Trace, plan: TierPlan) -> bool:
    """Whether a tier takes in every block and evicts none: nothing is left for a policy to say."""
    return (
        plan.write is WritePolicy.THROUGH
        and plan.admission is Admission.ALWAYS
        and plan.writes is None
        and plan.blocks >= trace.distinct
    )


_Task = tuple[Trace, tuple[TierPlan, ...]]


def put_together(
    trace: Trace, plans: Sequence[TierPlan], parts: Sequence[GroupResult]
) -> Simulation:
    """Who serves which block: of each request the longest prefix that the tiers hold together."""
    done = [tier for part in parts for tier in part.tiers]
    having = [np.frombuffer(each, bool) for part in parts for each in part.here]
    found = np.logical_or.reduce([np.zeros(trace.references, bool), *having])
    # A block is served if none before it in its request was missing.
    missing = np.cumsum(~found)
    starts = np.concatenate([[0], trace.ends[:-1]]) if len(trace.ends) else trace.ends
    before = np.concatenate([[0], missing])[starts]
    left = missing == np.repeat(before, np.diff(trace.ends, prepend=0))
    tiers = []
    for plan, tier, here in zip(plans, done, having, strict=True):
        hits = int((left & here).sum())
        tiers.append(msgspec.structs.replace(tier, kind=plan.kind, hits=hits))
        left &= ~here
    return Simulation(trace.references, tiers)


def simulate_all(
    runs: Sequence[tuple[Trace, Sequence[TierPlan]]],
    tell: Callable[[int], None] = lambda tiers: None,
) -> list[Simulation]:
    """Run traces through stacks, on all cores; `tell` hears how many tiers are done."""
    asked: dict[_Task, int] = {}
    for trace, plans in runs:
        for task in _tasks(trace, plans):
            asked[task] = asked.get(task, 0) + 1
    # The longest first, so that all cores come to an end together.
    tasks = sorted(asked, key=lambda task: -task[0].references * len(task[1]))
    parts: dict[_Task, GroupResult] = {}
    for number, part in spread(lambda task: run_group(*task), tasks):
        parts[tasks[number]] = part
        tell(len(tasks[number][1]) * asked[tasks[number]])
    return [
        put_together(trace, plans, [parts[task] for task in _tasks(trace, plans)])
        for trace, plans in runs
    ]


def _tasks(trace: Trace, plans: Sequence[TierPlan]) -> list[_Task]:
    """What has to be run. What a tier is called makes no difference, so it is left out; what feeds
    it makes one only to how much it remembers."""
    told, above = [], 0
    for plan in plans:
        remembering = plan.admission is Admission.SECOND_TOUCH or plan.writes is not None
        remembers = plan.remembers + above if remembering else 0
        told.append(msgspec.structs.replace(plan, kind="", remembers=remembers))
        if plan.write is not WritePolicy.NEVER:
            above = plan.blocks
    return [(trace, group) for group in groups_of(told)]


_work: tuple[Callable[[Any], Any], Sequence[Any]] = (id, ())
"""What forked workers do, and to what: they have it without a copy."""


def spread(
    function: Callable[[Task], Answer], tasks: Sequence[Task]
) -> Iterator[tuple[int, Answer]]:
    """The answer to each task with the task's number, as they come: from forked processes, as many
    at once as there are cores. With threads running, or one core, everything is done here."""
    global _work
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or len(tasks) == 1 or threading.active_count() > 1:
        for number, task in enumerate(tasks):
            yield number, function(task)
        return
    _work = (function, tasks)
    gc.freeze()  # or the collector of each fork would touch, and so copy, all of it
    pool = ProcessPoolExecutor(min(cores, len(tasks)), get_context("fork"), _begin_worker)
    left = len(tasks)
    try:
        with _signals_held():
            number_of = {pool.submit(_run_task, number): number for number in range(left)}
        for done in as_completed(number_of):
            left -= 1
            yield number_of[done], done.result()
    except BrokenProcessPool as error:
        raise KVTierError(
            "a worker process was killed: run it again with more free memory"
        ) from error
    finally:
        for worker in active_children() if left else ():
            worker.kill()
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


def _run_task(number: int) -> Any:
    function, tasks = _work
    return function(tasks[number])


def _begin_worker() -> None:
    gc.disable()  # it lives for a few tasks
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextmanager
def _signals_held() -> Iterator[None]:
    """What ends a command waits for the end of the block: what a handler raises amid Python's own
    work after a fork is printed and lost, and a worker that nobody knows of would go on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
