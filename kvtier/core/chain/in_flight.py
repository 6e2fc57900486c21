"""What is in flight: moves between tiers, and the tickets of requests that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvtier.core.interfaces.mover import Transfer, TransferKind
from kvtier.core.interfaces.tier import Tier
from kvtier.errors import NotResident
from kvtier.types import BlockKey, FilePlace, LoadStoreSpec, Outcome, Presence


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

    def leave(self) -> list[int]:
        """Wait for nothing any more; answers with the transfers that nobody else waits for."""
        for move in self.moves:
            move.waiters.remove(self)
        idle = [move.transfer.id for move in self.moves if not move.waiters]
        self.moves = []
        return idle

    def sealed(self, asked: Sequence[BlockKey]) -> list[tuple[Sequence[BlockKey], LoadStoreSpec]]:
        """All is taken that there is of these. Answers with where it is, piece by piece."""
        if len(self.pinned) + len(self.pending) == len(asked):
            self.keys = asked
        else:
            taken = self.pending.union(self.pinned)
            self.keys = [key for key in asked if key in taken]
            self.missing = [key for key in asked if key not in taken and key not in self.files]
        pieces, self.pieces = self.pieces, []
        return pieces

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
        "spoiled",
        "transfer",
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
        self.spoiled: dict[BlockKey, Outcome] = {}
        """Will be aborted whatever the mover says: dropped or found bad meanwhile."""


class Held:
    """Slots of blocks that have failed, kept while somebody may still be reading them: a block may
    have landed, and been shown to its readers, before its transfer failed."""

    def __init__(self) -> None:
        self._readers: Counter[BlockKey] = Counter()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._readers

    def keep(self, ticket: Ticket, keys: Sequence[BlockKey]) -> None:
        """One reader more of each."""
        ticket.held += keys
        self._readers.update(keys)

    def let_go(self, ticket: Ticket, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """One reader less of each; answers with those that have none left."""
        gone = set(keys)
        ticket.held = [key for key in ticket.held if key not in gone]
        self._readers.subtract(keys)
        free = [key for key in keys if not self._readers[key]]
        for key in free:
            del self._readers[key]
        return free


class Settled(msgspec.Struct, frozen=True):
    """What became of a move: committed keys, and the others by outcome."""

    move: Move
    committed: list[BlockKey]
    failed: dict[BlockKey, Outcome]
    blamed: dict[BlockKey, Outcome]
    """The part of `failed` that the source no longer offers."""
    landed: list[Ticket]
    """Tickets that waited for nothing but this."""
