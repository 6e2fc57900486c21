"""The data side of a medium: what moves its bytes.

A `Handler` runs in the mover's threads (in another process when serving). It may block, and it
never decides anything: the `Tier` does (`kvtier.interfaces.tier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtier.record.record import Buffer
from kvtier.types import BlockKey, LoadStoreSpec, Outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Spec = TypeVar("Spec", bound=LoadStoreSpec)


class Handler(ABC):
    """Moves records between one medium and host memory; reports, never decides.

    `load` and `store` are called from many threads at once, with batches of at most `batch_blocks`
    blocks. They return one outcome a block and raise nothing but programming errors. A load need
    not verify: the mover, or who reads the record next, proves it. Records in host memory are
    aligned to 4 KiB and long enough for the largest payload of the namespace.
    """

    concurrency: int = 4
    batch_blocks: int = 8
    call_seconds: float = 5.0
    """The longest that one call takes. A call that began before its transfer's deadline may end so
    much after it; a mover process in which one takes longer is held to hang, and is killed."""
    store_seconds: float | None = None
    """The same of a store, if that may take longer than a load."""

    @abstractmethod
    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with the record of its key."""

    @abstractmethod
    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        """Write each record where the spec says; complete before it is reported OK."""

    def find(self, spec: LoadStoreSpec, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Whether the medium has each block: OK, GONE, or why it cannot be asked. Only of tiers
        that do not know it themselves (`Tier.finds`), and all keys of a request at once."""
        return [Outcome.IO_ERROR] * len(keys)

    def close(self) -> None:  # noqa: B027 - not every medium has something to release
        """Release files and connections."""


def own_spec(spec: LoadStoreSpec, kind: type[Spec]) -> Spec:
    """A spec in the words of one's own medium; raises TypeError if it is in another's."""
    if not isinstance(spec, kind):
        raise TypeError(f"a tier of the kind {kind.medium} cannot reach {type(spec).__name__}")
    return spec


class HostHandler(Handler):
    """A medium that IS host memory: others read into it and write from it without a copy."""

    @abstractmethod
    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        """The records of a spec, in place."""

    @abstractmethod
    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        """Block `index` has arrived, with a header that is proved, or never will: whoever waits for
        it may go on."""


class HostSlots(Protocol):
    """Host memory in numbered slots, each with an entry in a table."""

    data: Buffer
    """All slots, in place, one behind the other."""

    def record(self, slot: int) -> Buffer:
        """A slot's record, in place."""

    def state(self, slot: int) -> int:
        """The state byte of a slot's entry."""

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it stands."""

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """The entries of some slots as they stand."""


class HostRegion(HostSlots, Protocol):
    """Slots that several processes of one engine map. They come and go with the slabs that the
    engine owns, or finds at its neighbours."""

    path: Path

    @property
    def namespace(self) -> bytes:
        """The digest of the namespace whose blocks it holds."""

    def name_engine(self, engine: str) -> None:
        """For its owner: whose it is, in a word that the engine's workers know, too."""

    def pinning_order(self) -> Sequence[range]:
        """The slots in pieces, in the order in which a device pins them."""

    def note_pinned(self, rank: int, piece: range | None) -> None:
        """For a rank: a piece is pinned for its device; None: it begins to pin."""

    def watch(
        self, mapped: Callable[[Sequence[range]], None], unmapped: Callable[[range], None]
    ) -> None:
        """Be told of pieces that are mapped from now on, and, before that, of slots that are
        unmapped."""

    def refresh(self, slots: Sequence[int] = ()) -> None:
        """Map what its engine has made, or found, since the last call. Raises MediumError if one of
        these slots has no memory here afterwards: nobody may read or write there."""

    def close(self) -> None:
        """Unmap it."""


class RegionHandler(HostHandler):
    """Host memory that an engine's workers map, too (`Backend.attach`)."""

    region: HostRegion
