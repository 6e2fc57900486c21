"""The catalogue of slots in memory: which slot holds which key, what is pinned, what is free.

Everything here is answered from dictionaries. What a medium has to write down (table entries)
enters through the hooks at the end; they must not block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy

from kvtier.errors import NotResident
from kvtier.eviction import UNKNOWN, EvictionPolicy
from kvtier.eviction.retention import RetainedBlocks, RetainingPolicy
from kvtier.interfaces.tier import Events, Losses, Tier
from kvtier.slab import layout
from kvtier.slab.layout import runs
from kvtier.slab.recovery import Slots, Survivors, Times, Uses
from kvtier.types import (
    BlockKey,
    EventKind,
    Fate,
    LoadStoreSpec,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)

_LOOKED_AT = 256
"""Among so many free slots neighbours are looked for, or four times as many as are taken."""
_MORE_MAX = 512


def take_neighbours(free: deque[int], count: int) -> list[int]:
    """Take so many slots, those in the longest runs of the next ones that are free; ascending. What
    has been free for longest comes next."""
    next_ones = [free.popleft() for _ in range(count)]
    first = sorted(next_ones)
    if (
        not first or first[-1] - first[0] < count
    ):  # mostly: a new slab, or a prompt that was evicted
        return first
    look = min(len(free), max(_LOOKED_AT, 4 * count) - count, _MORE_MAX)
    next_ones += [free.popleft() for _ in range(look)]
    ordered = sorted(next_ones)
    taken: list[int] = []
    for start, stop in sorted(runs(ordered), key=lambda run: run[0] - run[1]):
        taken += ordered[start : min(stop, start + count - len(taken))]
        if len(taken) == count:
            break
    chosen = set(taken)
    free.extendleft(slot for slot in reversed(next_ones) if slot not in chosen)
    return sorted(taken)


_EXPECTED_MAX = 1 << 16
"""How many missing blocks of past requests are remembered, with the block before each."""


class PromptOrder:
    """Remembers blocks that requests looked for in vain, each with the block before it."""

    def __init__(self) -> None:
        self.before: OrderedDict[BlockKey, BlockKey] = OrderedDict()

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Remember which block comes before each of these: they may be stored soon."""
        before = self.before
        before.update(zip(keys[1:], keys, strict=False))
        while len(before) > _EXPECTED_MAX:
            before.popitem(last=False)

    def runs(
        self, keys: Sequence[BlockKey], slot_of: Callable[[BlockKey | None], int]
    ) -> Iterator[tuple[int, int, int]]:
        """Stored blocks by prompt: start and stop of each run among `keys`, and the slot of the
        block before it, UNKNOWN if there is none. A block that follows another one than its
        neighbour in `keys`, which has a slot, begins the run of another prompt."""
        before = [self.before.pop(key, None) for key in keys]
        begins, after = [0], [slot_of(before[0])]
        for at in range(1, len(keys)):
            if before[at] not in (None, keys[at - 1]):
                slot = slot_of(before[at])
                if slot != UNKNOWN:
                    begins.append(at)
                    after.append(slot)
        return zip(begins, [*begins[1:], len(keys)], after, strict=True)


_HIT, _MISS, _PENDING = Presence.HIT, Presence.MISS, Presence.PENDING

_QUARANTINE_SHARE = 128
"""At most one slot in so many stays quarantined; the oldest is used again beyond it."""

_TOUCHES_MAX = 64


class SlabTier(Tier):
    """A tier over numbered slots, one block each.

    A key is in at most one of three places: `_reserved` (on its way in), `_where` (a hit), or
    `_dropped_pinned` (offered to nobody any more, and its slot stays taken until the last unpin).
    A slot is free, or belongs to the key in `_key_of[slot]`, or is quarantined.
    """

    def __init__(
        self,
        medium: str,
        slot_bytes: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.retained = RetainedBlocks(clock)
        self._policy = RetainingPolicy(policy, self._is_retained, self.retained.__len__)
        self._survivors = Survivors()
        """What outlived an earlier process, for the tiers below, and again for the one above."""
        self._hottest: Survivors | None = Survivors()
        self.medium = medium
        self.slot_bytes = slot_bytes
        self._clock = clock
        self._prompts = PromptOrder()
        self._touched: list[Sequence[BlockKey]] = []
        self._foreign = False
        """Whether some slots belong to other processes (`_owned` is asked only then)."""
        self._where: dict[BlockKey, int] = {}
        self._key_of: list[BlockKey | None] = []
        self._reserved: dict[BlockKey, int] = {}
        self._unwanted: set[BlockKey] = set()  # reserved before a clear: to be aborted
        self._dropped_pinned: dict[BlockKey, int] = {}
        self._tainted: set[int] = set()  # to be quarantined when nobody reads there any more
        self._pins: dict[int, int] = {}
        self._free: deque[int] = deque()
        self._quarantine: deque[int] = deque()
        self._events = Events()
        self._losses = Losses()
        self._stats = TierStats(medium)

    # -- lookups ---------------------------------------------------------------------------

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        self._catch_up()
        where = self._where
        found = [_HIT if key in where else _MISS for key in keys]
        if self._reserved:
            reserved = self._reserved
            for index, key in enumerate(keys):
                if key in reserved:
                    found[index] = _PENDING
        return found

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        where = self._where
        try:
            slots = [where[key] for key in keys]
        except KeyError:
            missing = sum(key not in where for key in keys)
            raise NotResident(
                f"{missing} of {len(keys)} keys are not resident: look up first"
            ) from None
        pins = self._pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        if self._foreign:
            self._stats.neighbour_loads += len(slots) - len(self._own_among(slots))
        return self._locate(slots)

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        if failed:
            for key, outcome in failed.items():
                self._fail(key, outcome)
        where, dropped, pins = self._where, self._dropped_pinned, self._pins
        for key in keys:
            slot = where.get(key)
            if slot is None:
                slot = dropped[key]
            left = pins[slot] - 1
            if left:
                pins[slot] = left
                continue
            del pins[slot]
            if key in dropped:
                self._release([dropped.pop(key)])

    def _fail(self, key: BlockKey, outcome: Outcome) -> None:
        slot = self._where.get(key)
        if slot is None:  # dropped meanwhile, perhaps because somebody else has used its slot again
            return
        # Not if it is another's, who may have reused it under our eyes.
        if outcome is Outcome.CORRUPT and self._owned(slot):
            self._stats.corrupt += 1
            self._tainted.add(slot)
        self._drop([key])

    # -- stores ----------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._catch_up()
        where, reserved, dropped = self._where, self._reserved, self._dropped_pinned
        new = [
            key
            for key in dict.fromkeys(keys)
            if key not in where and key not in reserved and key not in dropped
        ]
        evicted: list[BlockKey] = []
        missing = len(new) - len(self._free)
        if missing > 0 and evict:
            evicted = self._evict(missing, keys)
        free = self._free
        count = min(len(new), len(free))
        self._stats.dropped += len(new) - count
        taken = new[:count]
        # In order: neighbours are moved by one call, and prompts are evicted from their ends.
        if self.in_files:
            slots = take_neighbours(free, count)
        else:
            slots = sorted(free.popleft() for _ in range(count))
        for key, slot in zip(taken, slots, strict=True):
            reserved[key] = slot
            self._key_of[slot] = key
        if slots:
            self._on_reserved(slots, taken)
        return Reservation(taken, self._locate(slots), evicted)

    def _evict(self, count: int, spared: Sequence[BlockKey]) -> list[BlockKey]:
        """Make room, but not at the cost of the very keys that are being offered."""
        self._tell_policy()
        where, pins = self._where, self._pins
        held = {where[key] for key in spared if key in where}
        taken = pins.keys() | held if held else pins
        slots = self._held_twice(count, taken)
        self._policy.remove(slots)
        slots += self._policy.evict(count - len(slots), taken)
        key_of = self._key_of
        victims = [key for slot in slots if (key := key_of[slot]) is not None]
        for key in victims:
            del where[key]
        self._stats.evicted += len(victims)
        self._events.add(EventKind.REMOVED, victims)
        self._on_evicted(slots, victims)
        self._release(slots)
        return victims

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        landed: list[BlockKey] = []
        slots: list[int] = []
        aborted: list[int] = []
        for key in keys:
            slot = self._reserved.pop(key, None)
            if slot is None:
                continue
            if (failed and key in failed) or key in self._unwanted:
                self._unwanted.discard(key)
                aborted.append(slot)
            else:
                landed.append(key)
                slots.append(slot)
        if aborted:
            self._stats.dropped += len(aborted)
            self._on_dropped(aborted)
            self._release(aborted)
        if landed:
            self._where.update(zip(landed, slots, strict=True))
            self._use(slots, landed)
            self._on_committed(slots, landed)
            self._stats.stored += len(landed)
            self._events.add(EventKind.STORED, landed)

    # -- what leaves -----------------------------------------------------------------------

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        self._touched.append(keys)
        if len(self._touched) >= _TOUCHES_MAX:
            self._tell_policy()

    def _tell_policy(self) -> None:
        """Pass on what was touched: kept for a quiet moment, because requests wait for `touch`."""
        touched, self._touched = self._touched, []
        where = self._where
        for offered in touched:
            keys = list(dict.fromkeys(offered))  # a policy is told of a slot once a call
            hits = next((i for i, key in enumerate(keys) if key not in where), len(keys))
            if hits < len(keys):
                self._prompts.expect(keys[max(0, hits - 1) :])
                behind = [where[key] for key in keys[hits:] if key in where]
                self._note_uses(self._own_among(behind))
            used = keys[:hits]
            slots = [where[key] for key in used]
            if self._foreign:
                self._on_used_by_us([slot for slot in slots if not self._owned(slot)])
                slots = [slot for slot in slots if self._owned(slot)]
                used = [self._key_at(slot) for slot in slots]
            if slots:
                self._note_uses(slots)
                self._policy.use(slots, used, self._clock(), UNKNOWN, len(keys) - hits)

    def tick(self) -> None:
        self._tell_policy()
        self.retained.expire()
        self._let_go_of_ended()

    def carry_uses(self, used: Mapping[BlockKey, tuple[int, float]]) -> None:
        now, where = self._clock(), self._where
        slots = {where[key]: layout.possible(*used[key], now) for key in used if key in where}
        self._on_carried({slot: uses for slot, uses in slots.items() if self._owned(slot)})

    def _use(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Tell the policy of new blocks, and of the one before them if it is known."""
        now = self._clock()
        for start, stop, slot in self._prompts.runs(keys, self._behind):
            self._policy.use(slots[start:stop], keys[start:stop], now, slot)

    def _behind(self, key: BlockKey | None) -> int:
        """The slot of a block behind which others come; UNKNOWN if the policy has not got it."""
        slot = UNKNOWN if key is None else self._where.get(key, UNKNOWN)
        return slot if slot != UNKNOWN and slot in self._policy else UNKNOWN

    def victims(self, count: int) -> list[BlockKey]:
        self._tell_policy()
        return [self._key_at(slot) for slot in self._policy.victims(count, self._pins)]

    def victims_within(self, count: int, seconds: float, chance: float) -> list[BlockKey]:
        self._tell_policy()
        slots = self._policy.victims(count, self._pins)
        likely = self._policy.chances(slots, seconds, self._clock())
        first = next((at for at, each in enumerate(likely) if each > chance), len(slots))
        return [self._key_at(slot) for slot in slots[:first]]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._drop([key for key in dict.fromkeys(keys) if key in self._where])

    def clear(self) -> None:
        self._catch_up()
        self.forget_recovered()
        self.retained.clear()
        self._unwanted.update(self._reserved)
        self._drop(list(self._where))

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        """Stop offering resident keys, for good: unlike an eviction this is written down."""
        free_now: list[int] = []
        slots = [self._where.pop(key) for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            if slot in self._pins:
                self._dropped_pinned[key] = slot
            else:
                free_now.append(slot)
        owned = self._own_among(slots)
        self._policy.remove(owned)
        self._on_dropped(owned)
        self._events.add(EventKind.REMOVED, keys)
        self._release(free_now)

    def _release(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more; tainted ones go into quarantine."""
        usable = self._own_among(slots)
        if self._tainted:
            tainted = [slot for slot in usable if slot in self._tainted]
            usable = [slot for slot in usable if slot not in self._tainted]
            self._tainted.difference_update(slots)
            self._quarantine.extend(tainted)
            for slot in tainted:
                self._on_quarantined(slot, self._key_at(slot))
        key_of = self._key_of
        for slot in slots:
            key_of[slot] = None
        while self._quarantine and (
            len(self._quarantine) > 1 + self._slot_count() // _QUARANTINE_SHARE
        ):
            usable.append(self._quarantine.popleft())
        if usable:
            self._make_free(usable)

    def _own_among(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in slots if self._owned(slot)] if self._foreign else list(slots)

    # -- retained blocks -------------------------------------------------------------------

    def _is_retained(self, slot: int) -> bool:
        return self._key_of[slot] in self.retained

    def retain_at_most(self, blocks: int) -> None:
        self.retained.allow(blocks)

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        where, reserved = self._where, self._reserved
        refused = self.retained.retain(
            keys, session, until, lambda key: key in where or key in reserved
        )
        self._let_go_of_ended()
        return refused

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        self._tell_policy()  # what was used until now goes first all the same
        free = self.retained.release(session, None if all else keys)
        self._let_go_of_ended()
        where, known = self._where, set(free)
        first = [*free, *(key for key in keys if key not in known)]
        self._policy.release(
            [where[key] for key in first if key in where and not self.retained.wanted(key)]
        )

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        return self.retained.blocks_of(session)

    def _let_go_of_ended(self) -> None:
        """What nobody retains any more is like others, whatever has become of it."""
        where = self._where
        if ended := self.retained.take_ended():
            self._policy.give_back([where[key] for key in ended if key in where])

    # -- what outlived an earlier process ----------------------------------------------------

    def _survived(self, slots: Slots, used_at: Times, uses: Uses) -> None:
        """Slots of one slab: the longest unused first, and each prompt from its head on."""
        found = Survivors()
        found.add(slots, used_at, uses)
        self._survivors.add_all_of(found)
        if self._hottest is not None:
            self._hottest.add_all_of(found)

    @property
    def recovered(self) -> int:
        return len(self._survivors)

    def take_recovered(self, count: int) -> tuple[Sequence[BlockKey], Sequence[int]]:
        return self._still_here(*self._survivors.take(count))

    def take_hottest(self, count: int) -> Sequence[BlockKey]:
        hottest = self._hottest
        return self._still_here(*hottest.take(count))[0] if hottest else []

    def _still_here(
        self, slots: Sequence[int], used: Sequence[int]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        key_of, where = self._key_of, self._where
        keys: list[BlockKey] = []
        uses: list[int] = []
        for slot, count in zip(slots, used, strict=True):
            key = key_of[slot]
            if key is not None and where.get(key) == slot:
                keys.append(key)
                uses.append(count)
        return keys, uses

    def forget_recovered(self) -> None:
        self._survivors.clear()

    def forget_hottest(self) -> None:
        self._hottest = None

    # -- bookkeeping -----------------------------------------------------------------------

    def _key_at(self, slot: int) -> BlockKey:
        key = self._key_of[slot]
        assert key is not None, "a slot in the policy holds a key"
        return key

    def take_events(self) -> list[TierEvent]:
        return self._events.take(self.medium)

    def take_lost(self) -> Sequence[tuple[Sequence[BlockKey], Fate]]:
        return self._losses.take()

    def stats(self) -> TierStats:
        stats = self._stats
        stats.blocks = len(self._where)
        stats.bytes_used = (len(self._where) + len(self._reserved)) * self.slot_bytes
        stats.free = len(self._free)
        stats.pinned = len(self._pins)
        stats.in_flight = len(self._reserved)
        stats.quarantined = len(self._quarantine)
        stats.retained = len(self.retained)
        stats.retain_refused = self.retained.refused
        stats.released = self.retained.released
        return copy(stats)

    def _adopt(
        self, slots: Sequence[int], keys: Sequence[BlockKey], last_used: Sequence[float]
    ) -> list[int]:
        """Take in own blocks found on the medium, oldest first, and each prompt from its head on;
        returns slots that hold a second copy of a known key."""
        where, key_of = self._where, self._key_of
        known = [each for each in (where, self._reserved, self._dropped_pinned) if each]
        copies: list[int] = []
        had = len(where)
        if all(each.keys().isdisjoint(keys) for each in known):  # a million are new at the start
            fresh = where
            where.update(zip(keys, slots, strict=True))  # of two copies in one table, the later one
        else:
            fresh = {
                key: slot
                for key, slot in zip(keys, slots, strict=True)
                if not any(key in each for each in known)
            }
            where.update(fresh)
        if len(where) - had < len(slots):
            rows = [row for row, key in enumerate(keys) if fresh.get(key) == slots[row]]
            held = {slots[row] for row in rows}
            copies = sorted(slot for slot in slots if slot not in held)
            slots = [slots[row] for row in rows]
            keys = [keys[row] for row in rows]
            last_used = [last_used[row] for row in rows]
        for slot, key in zip(slots, keys, strict=True):
            key_of[slot] = key
        now = self._clock()
        if len(last_used) and last_used[-1] > now:  # its time would stand still until then
            last_used = [min(at, now) for at in last_used]
        self._policy.load(layout.ends_first(slots, last_used), last_used)
        return copies

    # -- hooks: what the medium writes down; none may block ----------------------------------

    @abstractmethod
    def _locate(self, slots: list[int]) -> LoadStoreSpec:
        """Where these slots are, in the words of the medium."""

    def _catch_up(self) -> None:
        """Take in what is known of other processes' changes; does no I/O."""

    def _held_twice(self, count: int, taken: Container[int]) -> list[int]:
        """Own slots whose blocks others hold, too, and that go first; at most so many."""
        return []

    def _slot_count(self) -> int:
        """How many slots there are."""
        return len(self._key_of)

    def _owned(self, slot: int) -> bool:
        """Whether this process may write to the slot."""
        return True

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Slots are about to be written."""

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Slots hold what they should."""

    def _on_evicted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """What these slots hold makes room, and may be found again until they are used."""

    def _make_free(self, slots: Sequence[int]) -> None:
        """Slots may be used again."""
        self._free.extend(slots)

    def _on_dropped(self, slots: Sequence[int]) -> None:
        """What these slots hold must not be found again, not even after a restart."""

    def _on_quarantined(self, slot: int, key: BlockKey) -> None:
        """A slot failed verification."""

    def _note_uses(self, slots: Sequence[int]) -> None:
        """A request has used what these own slots hold: a statistic, no more."""

    def _on_used_by_us(self, slots: Sequence[int]) -> None:
        """A request has used what these slots of others hold."""

    def _on_carried(self, used: Mapping[int, tuple[int, int]]) -> None:
        """What these own slots hold was used so often before, and then at last."""
