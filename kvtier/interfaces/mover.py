"""What a mover promises, on threads or as a process of its own."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from kvtier.types import BlockKey, LoadStoreSpec, Outcome


class TransferKind(enum.Enum):
    """Why blocks move: loads go before stores, and stores are dropped under pressure."""

    FIND = "find"
    """Nothing moves: the medium is asked what it has. Source and target are the tier itself."""
    LOAD = "load"
    STORE = "store"


class Transfer(msgspec.Struct, kw_only=True):
    """Blocks to move from one tier of the stack to another; a piece of a plan, on its way.

    `source` and `target` are positions in the stack's list of tiers. `deadline` is a point of
    `time.monotonic()`, which all processes of a machine share.

    `prove` says that nobody else proves these records: the mover does, every byte of them. Without
    it whoever reads them from the target does, or somebody has proved them at the source; what is
    read from a medium still shows by its header whose it is, and how long.
    """

    id: int
    kind: TransferKind
    source: int
    target: int
    keys: Sequence[BlockKey]
    source_spec: LoadStoreSpec
    target_spec: LoadStoreSpec
    deadline: float
    prove: bool = True
    prefetch: bool = False
    """A load that nobody waits for yet, until `Mover.hasten` says otherwise."""


class TransferResult(msgspec.Struct, kw_only=True):
    """How a transfer ended, one outcome a key in the transfer's order.

    Of a find, OK says that the medium has the block, GONE that it has not.

    GONE and CORRUPT always speak of the source, the rest of the medium that is not host memory. If
    neither is, that is the target, and a source that cannot be read makes its blocks DROPPED.
    """

    id: int
    outcomes: list[Outcome]
    bytes_moved: int
    seconds: float
    """From submission to the end, the wait in the queue included."""
    busy_seconds: float
    """The part of it in which bytes moved."""


class MoverStats(msgspec.Struct):
    """Counters of a mover, which only grow and count transfers unless they say otherwise."""

    in_flight_blocks: int = 0
    """The only gauge: blocks of accepted transfers that have not ended."""
    timeouts: int = 0
    restarts: int = 0


class Mover(ABC):
    """Carries transfers out with bounded queues, priorities and deadlines.

    - `submit` never blocks. It answers False when a tier would have more than its
      `queue_blocks` in flight; loads are counted against loads alone, so that stores never crowd
      them out. A mover that is closed or down refuses everything.
    - Every accepted transfer gets exactly one result, and when the result is there nothing touches
      the target any more: until then its slots must not be used for anything else.
    - Every record that is read from a medium is verified before it is reported OK, in full or, if
      its reader proves it (`Transfer.prove`), by its header. The target is told block by block as
      they land (`HostHandler.landed`), not only at the end.
    - What is written from host memory is verified in full first if `Transfer.prove` says so.
    - A transfer past its deadline ends with TIMEOUT for the blocks not moved yet.
    - `cancel` ends what has not started with CANCELLED and lets the rest finish.
    - A prefetch starts only where no load waits, holds a bounded share of the threads of its tier,
      and is counted beside the loads, so that it never crowds one out.
    - A mover owns its handlers and closes them; results can still be polled after `close`.
    """

    @property
    def down(self) -> bool:
        """Whether it would refuse everything now: nothing is to be promised, or evicted, for it."""
        return False

    @property
    def lost(self) -> bool:
        """Whether it is down, and not to be back in a moment: nothing is worth waiting for it."""
        return False

    @abstractmethod
    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False if it was refused, in which case there will be no result."""

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Transfers that ended since the last call; never blocks."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Sleep until a result may be there, at most so long; for callers that may block."""

    @abstractmethod
    def cancel(self, ids: Sequence[int]) -> None:
        """Stop caring about these transfers."""

    def hasten(self, ids: Sequence[int]) -> None:  # noqa: B027 - one that has a single queue
        """Somebody waits for these prefetches now: they are loads like others from here on."""

    @abstractmethod
    def stats(self) -> MoverStats:
        """Counters and gauges at this moment."""

    @abstractmethod
    def close(self) -> None:
        """End what runs (its results are CANCELLED or as they ended) and release everything."""
