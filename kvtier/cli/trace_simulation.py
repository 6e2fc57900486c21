"""What a stack would have served of a trace of requests: hits by tier, bytes moved, wear.

Every tier has a real eviction policy and is told of requests as a running stack tells it. What is
left out is time: a store or load is done before the next request comes. `read_trace` reads a trace,
`simulate` runs it through one stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.chain.admission import SPREAD_S, DynamicAdmission
from kvtier.chain.store import TOUCHES_KEPT, Touches
from kvtier.errors import UNREADABLE, ConfigError
from kvtier.eviction import UNKNOWN, EvictionPolicy, create_policy
from kvtier.interfaces.write_budget import BURST_S, TokenBucket
from kvtier.settings import Admission, WritePolicy
from kvtier.system.disk import read_bounded
from kvtier.types import BlockKey

_BLOCK_MAX = 1 << 63
_BYTES_MAX = 1 << 30
_LINE_FORM = '{"timestamp": 27000, "hash_ids": [0, 1, 2]}'


class Request(NamedTuple):
    """When, in seconds, and the numbers of the prompt's blocks, the head of the prefix first."""

    time: float
    blocks: tuple[int, ...]


class _TraceLine(msgspec.Struct):
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
    decoder = msgspec.json.Decoder(_TraceLine)
    requests: list[Request] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except UNREADABLE as error:
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
        self._slot_of: dict[int, int] = {}
        self._block_at = [0] * room
        self._free = list(range(room - 1, -1, -1))
        self._policy: EvictionPolicy = create_policy(plan.eviction, room)
        second = plan.admission is Admission.SECOND_TOUCH
        self._touches = Touches(plan.remembers) if second else None
        self._budget = None if plan.writes is None else _Budget(plan, plan.writes, start)

    def having(self, blocks: Sequence[int]) -> bytes:
        """Whether each of these is here."""
        return bytes(map(self._slot_of.__contains__, blocks))

    def request(
        self,
        time: float,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        here: bytes,
        above: bytes,
    ) -> list[int]:
        """Use what is here, and take in what is new if it comes this way; what was evicted.
        `here` says of each block whether it is here, `above` whether host memory had it."""
        slot_of = self._slot_of
        if self._budget is not None:
            self._budget.request(time, keys, list(map(bool, above)))
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
            wanted = [block for block, key in named if key in again or block in self._slot_of]
        if self._budget is not None:
            wanted = self._affordable(time, wanted, keys[first:])
        if self.plan.write is not WritePolicy.THROUGH:
            wanted = [block for block in wanted if block in self._slot_of]
        return wanted[: max(0, self.plan.blocks - first)]

    def _affordable(
        self, time: float, wanted: Sequence[int], keys: Sequence[bytes]
    ) -> Sequence[int]:
        """Those of the wanted blocks that are here, or that the budget is best spent on."""
        assert self._budget is not None
        here = self._slot_of
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
        left = [block for block in evicted if block not in self._slot_of]
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
        slot_of, block_at, free = self._slot_of, self._block_at, self._free
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
            slot = self._slot_of.get(block, UNKNOWN)
            if slot == UNKNOWN:
                break
            slots.append(slot)
        return slots


def simulate(requests: Sequence[Request], plans: Sequence[TierPlan]) -> Simulation:
    """Run a trace through a stack of these tiers, the first of which is host memory."""
    name_of = {block: block.to_bytes(8, "big") for each in requests for block in each.blocks}
    start = requests[0].time if requests else 0.0
    tiers = [_Tier(plan, len(name_of), start) for plan in _with_memories(plans)]
    references = 0
    for time, blocks in requests:
        references += len(blocks)
        keys = [name_of[block] for block in blocks]
        here = [tier.having(blocks) for tier in tiers]
        _count_hits(tiers, here)
        evicted: list[int] = []
        for tier, held in zip(tiers, here, strict=True):
            gone = tier.request(time, blocks, keys, held, here[0])
            if evicted and tier.plan.write is WritePolicy.ON_EVICT:
                gone += tier.catch(time, evicted, name_of)
            if tier.plan.write is not WritePolicy.NEVER:
                evicted = gone
    return Simulation(references, [tier.result for tier in tiers])


def _count_hits(tiers: Sequence[_Tier], here: Sequence[bytes]) -> None:
    """Who serves which block of a request: of the longest prefix that the tiers hold together, each
    those that no tier above it holds."""
    together = list(accumulate(here, lambda some, more: bytes(map(or_, some, more))))
    end = together[-1].find(0)
    if end < 0:
        end = len(together[-1])
    served = 0
    for tier, held in zip(tiers, together, strict=True):
        found = held.count(1, 0, end)
        tier.result.hits += found - served
        served = found


def _with_memories(plans: Sequence[TierPlan]) -> list[TierPlan]:
    """The same, each of which remembers as many blocks more as the tier holds that feeds it."""
    told, above = [], 0
    for plan in plans:
        told.append(msgspec.structs.replace(plan, remembers=plan.remembers + above))
        if plan.write is not WritePolicy.NEVER:
            above = plan.blocks
    return told
