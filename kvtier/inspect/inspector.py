"""The third door of a backend: what people do to its medium from outside.

An `Inspector` opens nothing as a tier. It locks and writes nothing unless it is asked to, and a
running engine does not notice it. What it reads may therefore be a moment old, and a block that is
just being written may look as if it were not there.

A backend that implements `listing` alone has `ls`, `du`, `verify` and `prewarm` from and to
its tiers. For the rest the methods here raise `Unsupported`, which says what the kind cannot do.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from kvtier.errors import ConfigError, KVTierError, Unsupported, describe_error
from kvtier.inspect.contents import (
    Block,
    Cleared,
    Contents,
    Depth,
    Finding,
    Garbage,
    Hold,
    InspectorContext,
    Part,
    Reach,
    SlotMap,
    Stored,
    Writes,
    standing,
)
from kvtier.inspect.filling import TAKE_ALL, Filling, ListedSource, Source, TierOpener
from kvtier.inspect.measuring import folder_beside, with_slack
from kvtier.inspect.proofs import HandlerProver, Prover
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import TierContext
from kvtier.settings import ByteSize, Capacity, TierSettings
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, Namespace

S = TypeVar("S", bound=TierSettings)


class Inspector(ABC, Generic[S]):
    """Looks at one tier's medium from outside, and does to it what people ask for."""

    reach: Reach = Reach.MACHINE

    def __init__(self, opener: TierOpener, settings: S, context: InspectorContext) -> None:
        self.opener = opener
        self.settings = settings
        self.context = context
        self.tier = context.tier
        self.engine = context.engine
        self.reporter = context.reporter
        self.kind = settings.kind
        self.contents = Contents(where=self.where(), unseen=True)
        """What the last `look` has found; whatever cannot be read later adds to its troubles."""

    # -- where it is, and how large

    def where(self) -> str:
        """Where the tier keeps its blocks, as its settings say it."""
        return str(getattr(self.settings, "path", None) or "")

    def folder(self) -> Path | None:
        """The folder in which they lie, if they lie in a file system of this machine."""
        path = getattr(self.settings, "path", None)
        return Path(path) if path else None

    def capacity(self) -> int:
        """The bytes that the tier may take here; its folder need not be there yet."""
        total = 0
        home = self.folder()
        for folder in [] if home is None else [home, *home.parents]:
            try:
                total = Disk().total_bytes(folder)
            except OSError:
                continue
            if total:
                break
        return self.settings.capacity.resolve(total)

    def unusable(self) -> ConfigError | None:
        """Why this user cannot open the tier though its settings are right, as if the credentials
        are another user's: an engine would not start. Asks nobody."""
        return None

    # -- what is there

    def listing(self) -> Iterator[Stored]:
        """Every committed block, of all namespaces. The one method that a backend should have."""
        raise Unsupported(
            f"what a tier of kind {self.kind} holds cannot be seen from outside: an engine's "
            "/metrics say how much; where a command has --tier, that leaves it out"
        )

    def look(self, depth: Depth = Depth.COUNTED, uses_of: str | None = None) -> Contents:
        """See what is there, as far as it can be seen: what cannot is a trouble, and no error. How
        often blocks were used is read of the namespaces that begin with `uses_of`."""
        self.contents = Contents(where=self.where(), unseen=True)
        try:
            self._look(depth, uses_of)
        except (KVTierError, OSError) as error:
            self.contents.troubles.append(describe_error(error))
        return self.contents

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        """Fill `contents`, which are `unseen` until this says something else."""
        found = self.contents
        parts: dict[str, Part] = {}
        for stored in self.listing():
            name = stored.namespace.id
            if (part := parts.get(name)) is None:
                part = parts[name] = self.part(name)
                found.namespaces[name] = stored.namespace
            part.blocks += 1
            part.bytes += stored.bytes
            part.add_times(stored.stored_at, stored.stored_at)
            if stored.hits is not None:
                part.add_uses(stored.hits, stored.used or 0.0)
        found.parts = sorted(parts.values(), key=lambda part: -part.bytes)
        found.used = sum(part.bytes for part in found.parts)
        found.capacity = self.capacity()
        if (folder := self.folder()) is not None:
            found.free = Disk().free_bytes(standing(folder))
        found.unseen = False

    def part(self, namespace: str) -> Part:
        """Nothing yet of a namespace."""
        used = self.in_use(namespace)
        return Part(tier=self.tier, kind=self.kind, namespace=namespace, in_use=used)

    def in_use(self, namespace: str) -> bool | None:
        """Whether an engine has a namespace open; None where that cannot be seen."""
        return None

    def slot_maps(self) -> Sequence[SlotMap]:
        """The slots of the medium, if it has some."""
        return ()

    def blocks(self, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[Block]:
        """The blocks of namespaces that begin so. `begins` are the first digits of the keys that
        are asked for: a store lists no others, and any medium may."""
        if self.contents.unseen:
            return
        with self.noting_troubles():
            for stored in self.listing():
                name = stored.namespace.id
                if not name.startswith(namespace) or not stored.key.hex().startswith(tuple(begins)):
                    continue
                yield Block(
                    tier=self.tier,
                    kind=self.kind,
                    namespace=name,
                    key=stored.key,
                    bytes=stored.bytes,
                    stored_at=stored.stored_at,
                    place=stored.where,
                    hits=stored.hits,
                    used=stored.used,
                    at=stored.at,
                )

    @contextmanager
    def noting_troubles(self) -> Iterator[None]:
        """What fails here is a trouble of this tier, and ends nothing else."""
        try:
            yield
        except FileNotFoundError:  # removed since it was listed
            return
        except (KVTierError, OSError) as error:
            if (said := describe_error(error)) not in self.contents.troubles:
                self.contents.troubles.append(said)

    # -- what is retained

    def holds(self, namespace: str) -> dict[BlockKey, list[Hold]]:
        """By whom blocks of a namespace are retained, as far as the medium remembers it."""
        return {}

    def pin(self, namespace: str, keys: Sequence[BlockKey], until: float, most: int) -> int:
        """Have engines retain these blocks until then, whether they are there or not, and as many
        as `most` with those that were pinned before; how many are now."""
        raise self._cannot("remember what is pinned", "leave it out with --tier")

    def unpin(self, namespace: str, keys: Sequence[BlockKey] | None) -> int:
        """Take that back for these, or for all; how many were pinned."""
        raise self._cannot("remember what is pinned", "leave it out with --tier")

    # -- what records are worth

    def prover(self, namespaces: Mapping[str, Namespace]) -> Prover:
        """Reads blocks and checks their records; `namespaces` are all that are known."""
        return HandlerProver(self._open_handler, namespaces)

    def _open_handler(self, namespace: Namespace) -> Handler:
        settings = msgspec.structs.replace(self.settings, **TAKE_ALL)
        return self.opener.open_handler(
            settings, TierContext(namespace, self.engine, stack=self.engine)
        )

    def quarantine(self, blocks: Sequence[Block]) -> int:
        """Take bad blocks of one `home` out of use; how many. Raises MediumInUse if an engine has
        them."""
        raise self._cannot("take bad blocks out of use", "an engine that meets one drops it")

    def home_of(self, block: Block) -> str:
        """Blocks of one home are taken out of use together."""
        return str(self.tier)

    def remove_broken(self, namespace: str) -> list[str]:
        """Remove what cannot be what kvtier writes, in namespaces that begin so, and take back what
        was said of it; what was left, and why."""
        return []

    # -- what goes

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        """What nobody will ask for again, of what is idle for so many seconds too."""
        raise self._cannot("find what nobody will ask for again", "leave it out with --tier")

    def clear(self, part: Part) -> Iterable[Cleared]:
        """Remove all blocks of a namespace; what became of them."""
        raise self._cannot("remove its blocks from outside", "leave it out with --tier")

    def try_to_clear(self, part: Part, remove: Callable[[], object]) -> Cleared:
        """What becomes of a part that this removes."""
        done = Cleared(self.tier, self.kind, part.namespace, part.blocks, part.bytes)
        try:
            remove()
        except (KVTierError, OSError) as error:
            done.kept = describe_error(error)
        return done

    def forget_troubles(self, begins: str) -> None:
        """What could not be read of something is no trouble any more: it is gone."""
        found = self.contents
        found.troubles = [said for said in found.troubles if not said.startswith(begins)]

    # -- how it does

    def checks(self) -> Iterator[Finding]:
        """What is good and what is not about this machine, for this tier."""
        return iter(())

    def area(self) -> str:
        """What findings about this tier are filed under."""
        return f"{self.tier} {self.kind}"

    def measuring_place(self, room: int) -> AbstractContextManager[S]:
        """The settings of a tier like this one with room for so many bytes, in a place of its own
        that is gone afterwards: neither the budget nor the blocks of a live engine are touched.
        Raises MediumError where that has no room."""
        home = self.folder()
        if home is None:
            raise self._cannot("be measured beside what it holds", "bench leaves it out")
        return self._measure_in(home, room)

    @contextmanager
    def _measure_in(self, home: Path, room: int) -> Iterator[S]:
        with folder_beside(home, room, self.kept_free()) as folder:
            wanted = TAKE_ALL | {"capacity": Capacity(ByteSize(with_slack(room)))}
            yield msgspec.structs.replace(self.settings, **wanted, **self.moved_to(folder))

    def writes(self) -> Writes | None:
        """What was written to a medium that wears, and what may be; None where nobody counts."""
        return None

    def kept_free(self) -> int:
        """How many bytes the tier leaves free on its file system."""
        return 0

    def moved_to(self, folder: Path) -> dict[str, object]:
        """The settings of the same tier in another folder."""
        kind: Any = type(getattr(self.settings, "path", ""))  # others have types of their own
        return {"path": kind(folder)}

    # -- copies out of it and into it

    def sources(self, namespace: str) -> list[Source]:
        """The blocks of one namespace, to be copied elsewhere."""
        if self.contents.unseen:
            return []
        listed = [stored for stored in self.listing() if stored.namespace.id == namespace]
        return [ListedSource(self.tier, self.kind, self._open_handler, listed)]

    def complete(self, namespace: str, room: int) -> None:
        """Add to a look at what is written down what only a listing finds, of namespaces that begin
        so; not where what is written down fills all the room there is. Raises MediumError."""

    def filling(self) -> Filling[S]:
        """How it is filled by a copy."""
        return Filling(self.opener, self.settings, self.context, self.capacity())

    def _cannot(self, what: str, remedy: str) -> Unsupported:
        return Unsupported(f"a tier of kind {self.kind} cannot {what}: {remedy}")
