"""The ledger: the only owner of transfers in flight; only it commits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count

import msgspec

from kvtier.chain.misses import MissLedger
from kvtier.chain.plan import HOST, gather
from kvtier.errors import NotResident
from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.interfaces.tier import Tier
from kvtier.types import (
    BlockKey,
    Fate,
    FilePlace,
    LoadStoreSpec,
    Outcome,
    Presence,
    Reservation,
)

logger = logging.getLogger(__name__)


class Ledger:
    """Owns pins and reservations in all tiers of a chain. For one thread, like the chain."""

    def __init__(self, tiers: Sequence[Tier], misses: MissLedger | None = None) -> None:
        self._tiers = tiers
        self._misses = misses or MissLedger(0)
        self._ids = count(1)
        self._moves: dict[int, Move] = {}
        self._tickets: dict[Ticket, None] = {}
        self._stores: dict[BlockKey, bool] = {}
        self._held = HeldSlots()
        self.deferred_verification = DeferredVerification(tiers)
        self.loading = [0] * len(tiers)
        """Blocks of each tier that are on their way into host memory for somebody."""
        self.joinable: dict[BlockKey, Move] = {}
        """Promotions that another request may join."""
        self.abandoned: set[BlockKey] = set()
        """Slots of promotions that nobody may join: given up, but the mover, or a reader that was
        promised them, may still be touching them."""
        self.dropped_pinned: set[BlockKey] = set()
        """Dropped from host memory while pinned: their slots are taken until the last unpin."""
        self.promised: dict[BlockKey, int] = {}
        """Keys that lookup has promised room for, and the tiers that were to give them."""
        self.watched: Collection[int] = ()
        """The tiers of which somebody wants to know what was evicted there."""
        self.evicted: list[tuple[int, list[BlockKey]]] = []
        """What made room in the watched tiers, until somebody takes it from here."""

    # what is in flight

    @property
    def moving(self) -> bool:
        """Whether the mover owes a result."""
        return bool(self._moves)

    def promoting(self, id: int) -> bool:
        """Whether a transfer is one that requests wait for."""
        move = self._moves.get(id)
        return move is not None and move.transfer.kind is TransferKind.LOAD

    # loads: open, fill, seal, release

    def open_ticket(self, request: str, deadline: float, proves: bool = False) -> Ticket:
        """Begin a load. The caller seals it, and releases it in the end."""
        ticket = Ticket(request, deadline, proves)
        self._tickets[ticket] = None
        return ticket

    def pin(self, ticket: Ticket, keys: Sequence[BlockKey]) -> bool:
        """Pin what is in host memory; False, and none is, if one of them is not there."""
        try:
            spec = self._tiers[HOST].prepare_load(keys)
        except NotResident:
            return False
        ticket.pieces.append((keys, spec))
        ticket.pinned = [*ticket.pinned, *keys] if ticket.pinned else keys
        return True

    def pin_files(self, ticket: Ticket, tier: int, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Pin in a lower tier what the ticket's reader fetches from its files itself."""
        pinned, spec = pin_what_is_there(self._tiers[tier], keys)
        ticket.files.update(zip(pinned, self._tiers[tier].files(spec), strict=True))
        ticket.pinned_files.append((tier, pinned))
        return pinned

    def join(self, ticket: Ticket, keys: Iterable[BlockKey]) -> None:
        """Wait for promotions that are under way."""
        for key in keys:
            move = self.joinable[key]
            if move not in ticket.moves:
                ticket.wait_for(move)
            ticket.pending.add(key)
            ticket.unsettled.add(key)

    def promote(
        self, ticket: Ticket, source: int, keys: Sequence[BlockKey], deadline: float
    ) -> Move | None:
        """Reserve host slots for blocks of a lower tier and pin them there; None if none fits."""
        move, _ = self.carry(source, HOST, keys, deadline, not ticket.proves)
        if move is None:
            return None
        if ticket.proves:
            self.deferred_verification.add(move.keys, source)
        ticket.wait_for(move)
        ticket.pending.update(move.keys)
        ticket.unsettled.update(move.keys)
        return move

    def seal(self, ticket: Ticket, asked: Sequence[BlockKey]) -> None:
        """Say where everything is that was taken, in the order asked for."""
        if len(ticket.pinned) + len(ticket.pending) == len(asked):
            ticket.keys = asked
        else:
            taken, files = ticket.pending.union(ticket.pinned), ticket.files
            ticket.keys = [key for key in asked if key in taken]
            ticket.missing = [key for key in asked if key not in taken and key not in files]
        pieces = ticket.pieces or [([], self._tiers[HOST].prepare_load([]))]
        ticket.spec, ticket.pieces = gather(pieces, ticket.keys), []

    def release(
        self,
        ticket: Ticket,
        failed: Mapping[BlockKey, Outcome] | None = None,
    ) -> None:
        """The reader of this ticket is done with its blocks, of which these have `failed`."""
        pinned, unsettled = ticket.pinned, ticket.unsettled
        if ticket.pinned_files:
            self._unpin_files(ticket, failed or {})
        if pinned and failed:
            ours = set(pinned)
            blamed = {key: why for key, why in failed.items() if key in ours}
            self._misses.note_failed(HOST, blamed)
            blamed = self.deferred_verification.blame(blamed)
            end_load(self._tiers[HOST], pinned, blamed)
            if blamed:
                self.note_dropped(blamed)
        elif pinned:
            self._tiers[HOST].complete_load(pinned)
        if failed and unsettled:
            self._void_blocks(ticket, {key: failed[key] for key in unsettled.intersection(failed)})
        if ticket.held:
            free = self._held.let_go(ticket)
            self.abandoned.difference_update(free)
            self._tiers[HOST].complete_store(free, dict.fromkeys(free, Outcome.CANCELLED))
        for move in ticket.moves:
            move.waiters.remove(ticket)
        ticket.pinned, ticket.moves, ticket.pending, ticket.unsettled = [], [], set(), set()
        self._tickets.pop(ticket, None)

    def _unpin_files(self, ticket: Ticket, failed: Mapping[BlockKey, Outcome]) -> None:
        for tier, keys in ticket.pinned_files:
            blamed = {key: failed[key] for key in keys if failed.get(key) in BLAMES_SOURCE}
            self._misses.note_failed(tier, blamed)
            end_load(self._tiers[tier], keys, blamed)
        ticket.pinned_files = []

    def _void_blocks(self, ticket: Ticket, failed: Mapping[BlockKey, Outcome]) -> None:
        for move in ticket.moves:
            bad = failed.keys() & set(move.keys)
            if bad:
                move.voided.update((key, failed[key]) for key in bad)
                self.abandon([move.transfer.id])

    def abandon(self, ids: Iterable[int]) -> list[int]:
        """Close these transfers to further requests; answers with those still under way."""
        known = [id for id in ids if id in self._moves]
        for move in [self._moves[id] for id in known]:
            if move.joinable:
                move.joinable = False
                self.abandoned.update(move.keys)
                for key in move.keys:
                    self.joinable.pop(key, None)
        return known

    # transfers between tiers: carry, refuse, settle

    def carry(
        self,
        source: int,
        target: int,
        keys: Sequence[BlockKey],
        deadline: float,
        prove: bool = True,
        *,
        prefetch: bool = False,
    ) -> tuple[Move | None, list[BlockKey]]:
        """Pin blocks at the source and reserve in the target what is new there. Answers with the
        move, None if there is nothing to move, and what the source lacks. A `prefetch` is for
        nobody yet: whoever wants these blocks joins."""
        # Pinned first: making room in the target may evict, and must not do so for nothing.
        pinned, spec = pin_what_is_there(self._tiers[source], keys)
        here = set(pinned) if len(pinned) < len(keys) else ()
        absent = [key for key in keys if key not in here] if len(pinned) < len(keys) else []
        if not pinned:
            return None, absent
        cause = Fate.FOR_PREFETCH if prefetch else Fate.FOR_LOAD
        taken = self._take(target, pinned, cause if target == HOST else Fate.FOR_WRITE)
        if len(taken.keys) < len(pinned):
            _, rest = split(pinned, dict.fromkeys(taken.keys, 1))
            self._tiers[source].complete_load(rest)
            if not taken.keys:
                return None, absent
            spec = gather([(pinned, spec)], taken.keys)
        transfer = Transfer(
            id=next(self._ids),
            kind=TransferKind.LOAD if target == HOST else TransferKind.STORE,
            source=source,
            target=target,
            keys=taken.keys,
            source_spec=spec,
            target_spec=taken.spec,
            deadline=deadline,
            prove=prove,
            prefetch=prefetch,
        )
        move = self._moves[transfer.id] = Move(transfer)
        if target == HOST:
            self.joinable.update(dict.fromkeys(move.keys, move))
            self.loading[source] += 0 if prefetch else len(move.keys)
        return move, absent

    def _take(self, tier: int, keys: Sequence[BlockKey], cause: Fate) -> Reservation:
        taken = self._tiers[tier].prepare_store(keys)
        if taken.evicted:
            self._misses.note(tier, taken.evicted, cause)
            if tier == HOST:
                self.deferred_verification.remove(taken.evicted)
            for key in taken.evicted if self.promised else ():
                self.promised.pop(key, None)
            if tier in self.watched:
                self.evicted.append((tier, taken.evicted))
        return taken

    def refuse(self, move: Move) -> None:
        """Undo a move that the mover did not take."""
        for ticket in move.waiters:
            ticket.pending.difference_update(move.keys)
            ticket.unsettled.difference_update(move.keys)
            ticket.moves.remove(move)
        move.waiters = []
        self.settle(move.transfer.id, [Outcome.DROPPED] * len(move.keys))

    def settle(self, id: int, outcomes: Sequence[Outcome]) -> SettledMove | None:
        """Commit what arrived, abort what did not; None for a transfer that is not ours."""
        move = self._moves.pop(id, None)
        if move is None:
            return None
        keys = move.keys
        failed: dict[BlockKey, Outcome] = {}
        if outcomes.count(Outcome.OK) != len(keys):
            reported = [*outcomes, *[Outcome.DROPPED] * (len(keys) - len(outcomes))]
            failed = {k: o for k, o in zip(keys, reported, strict=False) if not o.ok}
        blamed = self.deferred_verification.settled(move, failed)
        failed = {**move.voided, **failed}
        if blamed:
            self._misses.note_failed(move.transfer.source, {key: failed[key] for key in blamed})
        end_load(self._tiers[move.transfer.source], keys, blamed)
        if blamed and move.transfer.source == HOST:
            self.note_dropped(blamed)
        if move.transfer.kind is TransferKind.LOAD:
            self.loading[move.transfer.source] -= 0 if move.prefetch else len(keys)
            for key in keys:
                self.joinable.pop(key, None)
                self.abandoned.discard(key)
        committed = [key for key in keys if key not in failed] if failed else list(keys)
        ended = self._hold(move, failed) if failed and move.waiters else keys
        self._tiers[move.transfer.target].complete_store(ended, failed or None)
        landed = [ticket for ticket in move.waiters if self._land(ticket, move, failed)]
        return SettledMove(move, committed, failed, blamed, landed)

    def _hold(self, move: Move, failed: Mapping[BlockKey, Outcome]) -> list[BlockKey]:
        """Keep the slots of failed blocks that somebody may be reading; answers with the rest."""
        for ticket in move.waiters:
            read = [key for key in failed if key in ticket.unsettled]
            self._held.keep(ticket, read)
        abandoned = [key for key in failed if key in self._held]
        self.abandoned.update(abandoned)
        self._tiers[HOST].give_up(abandoned)
        return [key for key in move.keys if key not in self._held]

    def _land(self, ticket: Ticket, move: Move, failed: Mapping[BlockKey, Outcome]) -> bool:
        """Pin for a ticket what has become resident; whether it waits for nothing now."""
        waited = bool(ticket.pending)
        mine = [key for key in move.keys if key in ticket.unsettled]
        ticket.unsettled.difference_update(mine)
        ticket.pending.difference_update(mine)
        ticket.moves.remove(move)
        arrived = [key for key in mine if key not in failed] if failed else mine
        pinned, _ = pin_what_is_there(self._tiers[HOST], arrived)
        if pinned:
            ticket.pinned = [*ticket.pinned, *pinned]
        if len(pinned) < len(mine):
            here = set(pinned)
            for key in mine:
                if key not in here:
                    ticket.failed.setdefault(key, failed.get(key, Outcome.GONE))
        return waited and not ticket.pending

    # stores of the engine: reserve, commit

    def reserve(self, keys: Sequence[BlockKey]) -> Reservation:
        """Reserve host slots that the engine will fill."""
        taken = self._take(HOST, keys, Fate.FOR_STORE)
        if len(taken.keys) < len(keys):
            here = zip(keys, self._tiers[HOST].lookup(keys), strict=True)
            lacking = [key for key, at in here if at is Presence.MISS]
            self._misses.note(HOST, lacking, Fate.LACKS_ROOM)
        self.dropped_pinned.difference_update(taken.keys)  # or there would be no slots for them
        self._stores.update(dict.fromkeys(taken.keys, True))
        return taken

    def commit(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> list[BlockKey]:
        """The engine has filled them, but for `failed`; answers with what is resident now."""
        known = [key for key in keys if key in self._stores]
        lost = dict(failed) if failed else {}
        for key in known:
            if not self._stores.pop(key):
                lost[key] = Outcome.CANCELLED
        self._misses.note(HOST, lost, Fate.FAILED)
        self._tiers[HOST].complete_store(known, lost or None)
        return [key for key in known if key not in lost] if lost else known

    # time and loss

    def expire(self, now: float) -> tuple[list[Ticket], list[int]]:
        """End the waiting of what is late: tickets that failed, transfers to stop caring about."""
        if self.dropped_pinned:
            self.dropped_pinned.intersection_update(self.pinned(HOST))
        joinable = [move for move in self._moves.values() if move.joinable]
        late = {m.transfer.id: m for m in joinable if m.transfer.deadline <= now}
        slow = set(late)
        ended: list[Ticket] = []
        for ticket in self._tickets:
            if not ticket.pending:
                continue
            if ticket.deadline > now and not any(m.transfer.id in slow for m in ticket.moves):
                continue
            # Others may wait on, but nobody new shall join what has just taken too long.
            late.update((move.transfer.id, move) for move in ticket.moves)
            ticket.failed.update(dict.fromkeys(ticket.pending, Outcome.TIMEOUT))
            ticket.pending = set()
            ended.append(ticket)
        self.abandon(late)
        waits = {id for id, m in late.items() if any(t.pending for t in m.waiters)}
        return ended, [id for id in late if id not in waits]

    def void(self, keys: Iterable[BlockKey]) -> None:
        """Moves of these keys between tiers shall not make them visible."""
        chosen = set(keys)
        for move in self._moves.values():
            move.voided.update(dict.fromkeys(chosen.intersection(move.keys), Outcome.CANCELLED))
        self.abandon([id for id, move in self._moves.items() if move.voided])

    def void_all(self) -> list[int]:
        """Nothing that is on its way in shall become visible, be it moving or being stored.

        Answers with the transfers that are for nothing now.
        """
        for move in self._moves.values():
            move.voided = dict.fromkeys(move.keys, Outcome.CANCELLED)
        self._stores = dict.fromkeys(self._stores, False)
        self.deferred_verification.clear()
        return self.abandon(list(self._moves))

    def note_dropped(self, keys: Iterable[BlockKey]) -> None:
        """Host memory has dropped these keys; those that are pinned still take up their slots."""
        keys = set(keys)
        self.deferred_verification.remove(keys)
        self.dropped_pinned.update(keys.intersection(self.pinned(HOST)))

    def pinned(self, tier: int) -> list[BlockKey]:
        """What this ledger has pinned in a tier."""
        held = [t.pinned for t in self._tickets] if tier == HOST else []
        held += [keys for t in self._tickets for at, keys in t.pinned_files if at == tier]
        held += [m.keys for m in self._moves.values() if m.transfer.source == tier]
        return list(dict.fromkeys(key for keys in held for key in keys))


class Ticket:
    """What one request may read from host memory, and how far it has got there.

    `spec` says where all of `keys` are or will be; `files` where others lie that the reader fetches
    itself; `missing` could not be taken in. Blocks in `pending` are on their way. `failed` will not
    arrive, or too late: recompute them.

    A reader that `proves` what it reads finds what has only been looked at by its header.

    Its reader may look at all of these slots until the ticket is released, whatever has become of
    the blocks: pinned, still `unsettled`, or failed and so `held` for the reader's sake alone.
    """

    __slots__ = (
        "deadline",
        "failed",
        "files",
        "held",
        "keys",
        "missing",
        "moves",
        "pending",
        "pieces",
        "pinned",
        "pinned_files",
        "proves",
        "request",
        "spec",
        "unsettled",
    )
    spec: LoadStoreSpec

    def __init__(self, request: str, deadline: float, proves: bool = False) -> None:
        self.request = request
        self.deadline = deadline
        self.proves = proves
        self.keys: Sequence[BlockKey] = []
        self.missing: list[BlockKey] = []
        self.pending: set[BlockKey] = set()
        self.unsettled: set[BlockKey] = set()
        self.held: list[BlockKey] = []
        self.failed: dict[BlockKey, Outcome] = {}
        self.pinned: Sequence[BlockKey] = []
        self.moves: list[Move] = []
        self.pieces: list[tuple[Sequence[BlockKey], LoadStoreSpec]] = []
        self.files: dict[BlockKey, FilePlace] = {}
        self.pinned_files: list[tuple[int, Sequence[BlockKey]]] = []

    @property
    def landed(self) -> bool:
        """Whether nothing is on its way any more, be it good or bad."""
        return not self.pending

    @property
    def due(self) -> float:
        """When the last of its moves is expected to end; 0 if nobody knows."""
        return max((move.due for move in self.moves), default=0.0)

    def wait_for(self, move: Move) -> None:
        """Its blocks are wanted."""
        move.waiters.append(self)
        self.moves.append(move)
        self.pieces.append((move.keys, move.transfer.target_spec))

    def lower_tiers(self) -> dict[BlockKey, int]:
        """The tiers below host memory that blocks come from."""
        tiers = {key: move.transfer.source for move in self.moves for key in move.keys}
        tiers.update((key, tier) for tier, keys in self.pinned_files for key in keys)
        return tiers

    def __repr__(self) -> str:
        return (
            f"Ticket({self.request!r}, {len(self.keys)} keys, {len(self.files)} in files, "
            f"{len(self.missing)} missing, {len(self.pending)} pending, {len(self.failed)} failed)"
        )


def split(
    keys: Sequence[BlockKey], among: Mapping[BlockKey, int]
) -> tuple[list[BlockKey], list[BlockKey]]:
    """The keys that are among others, each as often as there, and the rest: pins are counted."""
    left = dict(among)
    mine: list[BlockKey] = []
    rest: list[BlockKey] = []
    for key in keys:
        count = left.get(key, 0)
        (mine if count else rest).append(key)
        left[key] = max(0, count - 1)
    return mine, rest


def pin_what_is_there(
    tier: Tier, keys: Sequence[BlockKey]
) -> tuple[Sequence[BlockKey], LoadStoreSpec]:
    """Pin keys, without those that another process took away since they were looked up."""
    try:
        return keys, tier.prepare_load(keys)
    except NotResident:
        here = tier.lookup(keys)
    hits = [key for key, now in zip(keys, here, strict=True) if now is Presence.HIT]
    try:
        return hits, tier.prepare_load(hits)
    except NotResident:
        return [], tier.prepare_load([])


class Move:
    """A transfer from its reservation to its result."""

    __slots__ = (
        "ahead",
        "due",
        "joinable",
        "keys",
        "prefetch",
        "transfer",
        "voided",
        "waiters",
    )

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.ahead = self.prefetch = transfer.prefetch
        """Whether it was begun as a prefetch, and whether nobody has waited for it so far."""
        self.due = 0.0
        """When it is expected to end; 0 if nobody knows."""
        self.keys = transfer.keys
        self.joinable = transfer.kind is TransferKind.LOAD
        self.waiters: list[Ticket] = []
        self.voided: dict[BlockKey, Outcome] = {}
        """Blocks that are aborted whatever the mover reports: dropped or found bad meanwhile."""


class HeldSlots:
    """Slots of failed blocks that are kept while a reader may still look at them: a block may have
    been shown to its readers before its transfer failed."""

    def __init__(self) -> None:
        self._readers: Counter[BlockKey] = Counter()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._readers

    def keep(self, ticket: Ticket, keys: Sequence[BlockKey]) -> None:
        """Add a reader to each of these."""
        ticket.held += keys
        self._readers.update(keys)

    def let_go(self, ticket: Ticket) -> list[BlockKey]:
        """Take a ticket from the readers of its blocks; answers with those that have none left."""
        keys, ticket.held = ticket.held, []
        self._readers.subtract(keys)
        free = [key for key in keys if not self._readers[key]]
        for key in free:
            del self._readers[key]
        return free


class SettledMove(msgspec.Struct, frozen=True):
    """What became of a move: committed keys, and the others by outcome."""

    move: Move
    committed: list[BlockKey]
    failed: dict[BlockKey, Outcome]
    blamed: dict[BlockKey, Outcome]
    """The part of `failed` that the source no longer offers."""
    landed: list[Ticket]
    """Tickets that waited for nothing but this."""


BLAMES_SOURCE = (Outcome.GONE, Outcome.CORRUPT)
"""Only these say that the source does not hold what it offered."""


_CORRUPT = (
    "tier %s: a block does not verify: %s. It was not served, and is computed anew. This tier has "
    "found %d so far: kvtier verify --repair looks for others, kvtier doctor at the medium"
)


def end_load(tier: Tier, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome]) -> None:
    """Unpin blocks, and log what does not verify: the first of a tier, and whenever that has
    doubled."""
    corrupt = [key for key, outcome in failed.items() if outcome is Outcome.CORRUPT]
    if not corrupt:
        tier.complete_load(keys, failed or None)
        return
    where = _place_of(tier, corrupt[0])
    before = tier.stats().corrupt
    tier.complete_load(keys, failed)
    found = tier.stats().corrupt
    if found.bit_length() > before.bit_length():
        logger.warning(_CORRUPT, tier.medium, where, found)


def _place_of(tier: Tier, key: BlockKey) -> str:
    """Where a pinned block lies, as far as that can be told."""
    pinned, spec = pin_what_is_there(tier, [key])
    places = tier.files(spec) if pinned and tier.in_files else []
    tier.complete_load(pinned)
    return "".join([f"key {key.hex()}", *(f", {each.path} at {each.at}" for each in places)])


class DeferredVerification:
    """Blocks in host memory, or on their way there, that nobody has proved yet, and their origin.

    A reader that proves what it reads spares the mover the same: until then the mover has looked at
    headers alone. If the reader finds a block bad, it is quarantined in the tier that it came from.
    The mover proves what is written down before a reader has, so that a bad block does not spread.
    What host memory holds bounds how many there are.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._origin: dict[BlockKey, int] = {}
        self._blamed: list[tuple[int, int]] = []

    def add(self, keys: Iterable[BlockKey], origin: int) -> None:
        """Only their reader proves these blocks, which come from this tier."""
        self._origin.update(dict.fromkeys(keys, origin))

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """These have been proved, or have left host memory."""
        if self._origin:
            for key in keys:
                self._origin.pop(key, None)

    def clear(self) -> None:
        """Host memory is empty."""
        self._origin.clear()

    def any_of(self, keys: Collection[BlockKey]) -> bool:
        """Whether one of these is still to be proved."""
        return bool(self._origin) and any(key in self._origin for key in keys)

    def blame(self, failed: Mapping[BlockKey, Outcome]) -> dict[BlockKey, Outcome]:
        """The outcomes that host memory is told of blocks of its own that failed. Unproved blocks
        that are corrupt are quarantined in the tier that they came from."""
        told = dict(failed)
        bad: dict[int, list[BlockKey]] = {}
        for key, outcome in failed.items():
            if outcome is Outcome.CORRUPT and key in self._origin:
                bad.setdefault(self._origin.pop(key), []).append(key)
                told[key] = Outcome.GONE  # it holds what it was given
        for origin, keys in bad.items():
            pinned, _ = pin_what_is_there(self._tiers[origin], keys)
            end_load(self._tiers[origin], pinned, dict.fromkeys(pinned, Outcome.CORRUPT))
            self._blamed.append((origin, len(keys)))
        return told

    def settled(self, move: Move, failed: Mapping[BlockKey, Outcome]) -> dict[BlockKey, Outcome]:
        """The outcomes that a move's source is told, when these of its blocks have failed."""
        transfer = move.transfer
        told = {key: why for key, why in failed.items() if why in BLAMES_SOURCE}
        if transfer.target == HOST:
            found = {k: why for k, why in move.voided.items() if why is Outcome.CORRUPT}
            told = {**found, **told}  # by a reader, before all of it had landed
            self.remove([*failed, *move.voided])
        elif transfer.source == HOST:
            told = self.blame(told)
            if transfer.prove:
                self.remove(key for key in transfer.keys if key not in failed)
        return told

    def tell_blamed(self, failed: Callable[[int, Sequence[Outcome]], None]) -> None:
        """Report, once, the blocks of each tier that were found bad after they had landed."""
        blamed, self._blamed = self._blamed, []
        for tier, blocks in blamed:
            failed(tier, [Outcome.CORRUPT] * blocks)
