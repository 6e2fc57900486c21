"""The third door of a backend: what people do to its medium from outside.

An `Inspector` opens nothing as a tier. It locks and writes nothing unless it is asked to, and a
running engine does not notice it. What it reads may therefore be a moment old, and a block that is
just being written may look as if it were not there.

A backend that implements `listing` alone has `ls`, `du`, `verify` and `prewarm` from and to
its tiers. For the rest the methods here raise `Unsupported`, which says what the kind cannot do.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvtier import amounts
from kvtier.errors import (
    ConfigError,
    FormatError,
    KVTierError,
    MediumError,
    Unsupported,
    describe_error,
)
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
    size_below,
    standing,
)
from kvtier.inspect.filling import TAKE_ALL, Filling, ListedSource, Source, TierOpener
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import TierContext
from kvtier.record.record import (
    CODEC_RAW,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Header,
    record_bytes,
    verify,
)
from kvtier.settings import ByteSize, Capacity, TierSettings
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk, lock_within
from kvtier.types import BlockKey, Namespace, Outcome

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


# -- places to measure in --------------------------------------------------------------------------


BENCH_MARK = ".kvtier-bench-"
"""How the names of the folders begin that measuring makes, and removes."""
_BENCH_S = 600.0
"""Measuring claims its folder within this time; younger ones may be about to."""


def with_slack(room: int) -> int:
    """The capacity of a tier in which so much is to fit."""
    return room + room // 8


@contextmanager
def folder_beside(home: Path, room: int, kept: int = 0) -> Iterator[Path]:
    """An empty folder on the disk of a tier's own, outside of what counts against its budget; gone
    afterwards. `kept` is to stay free there."""
    near = standing(home)
    beside = home.parent
    if near.stat().st_dev != beside.stat().st_dev or not os.access(beside, os.W_OK | os.X_OK):
        beside = near  # it is the root of a disk, or nothing may be written beside it
    refuse_without_room(beside, with_slack(room), kept)
    folder = Path(tempfile.mkdtemp(prefix=f"{BENCH_MARK}{os.getpid()}-", dir=beside))
    try:
        with holding(folder):  # for as long as it is held, `gc` leaves it alone
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_without_room(folder: Path, wanted: int, kept: int = 0) -> None:
    """Opening the tier would refuse, too, but speak of a capacity that the user never wrote."""
    free = Disk().free_bytes(folder) - kept
    in_memory = memory_limits.in_memory(folder)
    if in_memory and (left := memory_limits.memory_left()) is not None:
        free = min(free, left)  # a container may have less
    if free < wanted:
        raise MediumError(
            f"{folder} has too little free room to measure with {amounts.size(wanted)}: free some, "
            "or measure with fewer blocks (bench --blocks) or not at all (--no-measure)"
        )


def left_behind(root: Path) -> Iterator[Garbage]:
    """What measurements that were killed left in a tier's folder or beside it."""
    for folder in {root, root.parent}:
        for path in sorted(folder.glob(f"{BENCH_MARK}*")):
            with suppress(FileNotFoundError):  # it has just ended
                if not _lives(path):
                    what = "folder of a measurement that was killed"
                    yield Garbage(what, str(path), size_below(path), partial(_remove, path))


def _lives(path: Path) -> bool:
    young = time.time() - path.stat().st_mtime < _BENCH_S
    return young or folder_held(path)


def _remove(path: Path) -> bool:
    with suppress(FileNotFoundError):  # somebody else has just removed it
        if _lives(path):
            return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Let others see that somebody works in a folder, whatever it is for."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def folder_held(folder: Path) -> bool:
    """Whether a live process is `holding` it; another user's, or no folder, counts as held."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (PermissionError, NotADirectoryError):
        return True
    try:
        return not lock_within(fd, fcntl.LOCK_EX, 0.0)
    finally:
        os.close(fd)


# -- proofs of records -----------------------------------------------------------------------------


class Proof(enum.Enum):
    """What reading a record has shown."""

    GOOD = "good"
    BAD = "bad"
    GONE = "gone"
    """Its slot was used again, or its object deleted, while it was read."""
    NEWER = "newer"
    """A newer kvtier has written it: it is left alone."""
    UNREAD = "unread"
    """The medium failed."""


class Verdict(NamedTuple):
    """What a block's record is worth, why it is bad if it is, and the raw record if it is good."""

    proof: Proof
    why: str = ""
    record: memoryview | None = None


NEWER = Verdict(Proof.NEWER, "written by a newer kvtier")


class Prover(ABC):
    """Reads the records of one tier and checks them; from several threads at once."""

    @abstractmethod
    def prove(self, block: Block) -> Verdict:
        """Read a block's record; what it is worth."""

    def bytes_of(self, block: Block) -> int:
        """The memory that a block's proof takes, its record included."""
        return 2 * block.bytes  # what is read in pieces is there twice when they are joined

    def close(self) -> None:  # noqa: B027 - not every medium has something to release
        """Release files and connections."""


class HandlerProver(Prover):
    """Reads blocks through the handler of their tier, from where a listing says that they are."""

    def __init__(
        self, open_handler: Callable[[Namespace], Handler], namespaces: Mapping[str, Namespace]
    ) -> None:
        self._open_handler = open_handler
        self._namespaces = namespaces
        self._handlers: dict[str, Handler] = {}
        self._opening = threading.Lock()

    def prove(self, block: Block) -> Verdict:
        namespace = self._namespaces.get(block.namespace)
        if namespace is None or block.at is None:
            return Verdict(Proof.UNREAD, "nothing says how large its payload should be")
        size = record_bytes(namespace.payload_of(block.key))
        record = memoryview(mmap.mmap(-1, record_bytes(namespace.payload_bytes)))
        try:
            with self._opening:
                if block.namespace not in self._handlers:
                    self._handlers[block.namespace] = self._open_handler(namespace)
            handler = self._handlers[block.namespace]
        except KVTierError as error:
            return Verdict(Proof.UNREAD, str(error))
        (outcome,) = handler.load(block.at, [block.key], [record])
        if outcome is Outcome.GONE:
            return Verdict(Proof.GONE, "it was removed meanwhile")
        if outcome is Outcome.CORRUPT:
            return Verdict(Proof.BAD, "what is there cannot be the block")
        if not outcome.ok:
            return Verdict(Proof.UNREAD, outcome.value)
        return judge(record[:size], block)

    def bytes_of(self, block: Block) -> int:
        namespace = self._namespaces.get(block.namespace)
        return record_bytes(namespace.payload_bytes) if namespace else block.bytes

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()


def judge(record: memoryview, block: Block) -> Verdict:
    """What a raw record is worth."""
    if verify(record, block.key, bytes.fromhex(block.namespace)).ok:
        return Verdict(Proof.GOOD, "", record)
    if is_newer(record):
        return NEWER
    return Verdict(Proof.BAD, why_bad(record, block))


def is_newer(record: memoryview) -> bool:
    """Whether a newer kvtier has written this record, which is then to be left alone."""
    if bytes(record[: len(MAGIC)]) != MAGIC:
        return False
    return int.from_bytes(record[len(MAGIC) : len(MAGIC) + 2], "little") > VERSION


def why_bad(record: memoryview, block: Block) -> str:
    """What is wrong with a record that fails, in words."""
    try:
        header = Header.read(record)
    except FormatError as error:
        return str(error)
    if header.key != block.key:
        return f"the record belongs to the key {header.key.hex()}"
    if header.namespace.hex() != block.namespace:
        return f"the record belongs to the namespace {header.namespace.hex()}"
    if header.payload_bytes > len(record) - HEADER_BYTES:
        return f"a payload of {header.payload_bytes} bytes does not fit its slot"
    if header.codec != CODEC_RAW:
        return f"codec {header.codec}, where only raw records may be"
    return "the payload fails its checksum"
