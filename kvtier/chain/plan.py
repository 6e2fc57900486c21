"""What moves where: pure functions over columns, no I/O and no state.

A request's keys are one column; what is known of them are others, position by position. There is
never an object for one block: a prompt has hundreds of them and the engine waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import msgspec

from kvtier.cost.rates import DEVICE, LoadRun
from kvtier.settings import Admission, TierSettings, WritePolicy
from kvtier.types import BlockKey, LoadStoreSpec, Presence

HOST = 0
"""The tier that loads end in and stores begin in: host memory."""

NOWHERE = -1
COMING = -2
"""Being written by someone: neither a hit nor a miss yet."""
JOINING = -3
"""On its way into host memory by a load of ours, which another request may join."""

RUNS_MAX = 32
"""How finely the cost model looks at a prefix whose blocks alternate between tiers."""


class LinkPlan(msgspec.Struct, frozen=True):
    """By what rule blocks of one tier get to the next one that takes any."""

    source: int
    target: int
    write: WritePolicy
    admission: Admission


def leading(origins: Sequence[int]) -> int:
    """How many blocks come before the first that no tier can give now."""
    away = (NOWHERE, COMING)
    return next((place for place, at in enumerate(origins) if at in away), len(origins))


def plan_links(settings: Sequence[TierSettings]) -> list[LinkPlan]:
    """Each tier that is written to, fed by the nearest tier above that is not only read."""
    links = []
    source = HOST
    for target in range(HOST + 1, len(settings)):
        rule = settings[target]
        if rule.write is not WritePolicy.NEVER:
            links.append(LinkPlan(source, target, rule.write, rule.admission))
            source = target
    return links


def plan_host(
    keys: Sequence[BlockKey],
    answers: Sequence[Presence],
    ours: Collection[BlockKey],
    lost: Collection[BlockKey],
) -> list[int]:
    """The origin of each key as far as host memory knows it.

    `ours` are on their way in and may be joined; `lost` were given up while their slots were in
    use: nobody gets them before whoever uses those has let go.
    """
    hit, miss = Presence.HIT, Presence.MISS
    if not (ours or lost):
        return [HOST if a is hit else NOWHERE if a is miss else COMING for a in answers]
    pending = [JOINING if k in ours else NOWHERE if k in lost else COMING for k in keys]
    return [
        HOST if a is hit else NOWHERE if a is miss else p
        for a, p in zip(answers, pending, strict=True)
    ]


def plan_at_hand(
    keys: Sequence[BlockKey], answers: Sequence[Presence], arrived: Collection[BlockKey]
) -> list[int]:
    """The origin of each key that need not be waited for: `arrived` by a load of ours, or there."""
    hit = Presence.HIT
    return [
        HOST if answer is hit else JOINING if key in arrived else NOWHERE
        for key, answer in zip(keys, answers, strict=True)
    ]


def plan_lower(
    origins: list[int], asked: Sequence[int], tier: int, answers: Sequence[Presence]
) -> tuple[list[int], list[int]]:
    """Add what a lower tier answered for the positions `asked`: all origins, still unplaced."""
    hit, coming = Presence.HIT, Presence.PENDING
    if len(asked) == len(origins) and all(a is hit for a in answers):
        return [tier] * len(origins), []
    placed = origins.copy()
    for at, answer in zip(asked, answers, strict=True):
        if answer is hit:
            placed[at] = tier
        elif answer is coming:
            placed[at] = COMING
    return placed, [at for at, answer in zip(asked, answers, strict=True) if answer is not hit]


def plan_room(
    keys: Sequence[BlockKey],
    origins: list[int],
    promised: Mapping[BlockKey, int],
    room: int,
    slotless: Collection[int] = (),
) -> list[int]:
    """Take back what host memory has no room for: a hit is a promise.

    Every hit needs a slot that nobody else can have: a resident block will be pinned in its own, a
    lower one reserves one, unless its tier is `slotless`. What was promised before has its slot.
    Resident blocks come first; they give way only if the slots they would be pinned in were
    promised to others.
    """
    if len(keys) <= room:
        return origins
    fresh = [at for at, key in enumerate(keys) if origins[at] >= HOST and key not in promised]
    resident = [at for at in fresh if origins[at] == HOST]
    lower = [at for at in fresh if origins[at] > HOST and origins[at] not in slotless]
    kept = origins.copy()
    left = max(0, room - len(resident))
    for at in lower[left:]:
        kept[at] = NOWHERE
    if any(tier > HOST for tier in promised.values()):
        for at in resident[max(0, room) :]:
            kept[at] = NOWHERE
    return kept


def plan_queue(
    keys: Sequence[BlockKey],
    origins: list[int],
    promised: Collection[BlockKey],
    tier: int,
    room: int,
) -> list[int]:
    """Take back what the mover would not take any more of a lower tier: the leading ones stay."""
    fresh = [at for at, key in enumerate(keys) if origins[at] == tier and key not in promised]
    kept = origins.copy()
    for at in fresh[max(0, room) :]:
        kept[at] = NOWHERE
    return kept


def plan_ahead(origins: Sequence[int], start: int, most: int) -> tuple[int, int]:
    """The origin of the block at `start`, and where the run of those with the same one ends that
    begins there, after at most so many."""
    origin, stop = origins[start], start + 1
    while stop < min(len(origins), start + most) and origins[stop] == origin:
        stop += 1
    return origin, stop


def plan_runs(origins: Sequence[int], media: Sequence[str], sizes: Sequence[int]) -> list[LoadRun]:
    """The unbroken head of a prefix, as the cost model wants it: run by run, link by link."""
    runs: list[LoadRun] = []
    start = 0
    for origin, group in groupby(origins):
        stop = start + len(list(group))
        if origin in (NOWHERE, COMING):
            break
        # What is in host memory, or nearly there, only has to cross to the device.
        link = media[origin] if origin > HOST else DEVICE
        blocks, size = stop - start, sum(sizes[start:stop])
        if runs and runs[-1].link == link:
            last = runs.pop()
            blocks, size = blocks + last.blocks, size + last.bytes
        runs.append(LoadRun(link, blocks, size))
        start = stop
    return runs if len(runs) <= RUNS_MAX else _coarse(runs)


def _coarse(runs: list[LoadRun]) -> list[LoadRun]:
    """A finely mixed prefix, sorted by link within pieces: the cost model looks at each run."""
    step = -(-len(runs) // (RUNS_MAX // 4))
    coarse = []
    for start in range(0, len(runs), step):
        piece = runs[start : start + step]
        for link in dict.fromkeys(run.link for run in piece):
            mine = [run for run in piece if run.link == link]
            coarse.append(LoadRun(link, sum(r.blocks for r in mine), sum(r.bytes for r in mine)))
    return coarse


def gather(
    pieces: Sequence[tuple[Sequence[BlockKey], LoadStoreSpec]], keys: Sequence[BlockKey]
) -> LoadStoreSpec:
    """One spec for `keys`, each of which is in one of the pieces, in as few slices as possible."""
    if len(pieces) == 1 and pieces[0][0] == keys:
        return pieces[0][1]
    place = {
        key: (number, at) for number, (held, _) in enumerate(pieces) for at, key in enumerate(held)
    }
    slices: list[LoadStoreSpec] = []
    run_number = run_start = run_stop = -1
    for key in keys:
        number, at = place[key]
        if number == run_number and at == run_stop:
            run_stop += 1
            continue
        if run_number >= 0:
            slices.append(pieces[run_number][1].select(run_start, run_stop))
        run_number, run_start, run_stop = number, at, at + 1
    slices.append(pieces[max(run_number, 0)][1].select(max(run_start, 0), max(run_stop, 0)))
    return slices[0] if len(slices) == 1 else type(pieces[0][1]).join(slices)
