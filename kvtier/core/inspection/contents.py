"""What a medium holds, as an inspector reports it: by namespace, and block by block."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

from kvtier.core.settings.retain_settings import RetainSettings
from kvtier.types import BlockKey, LoadStoreSpec, Namespace


class Depth(enum.Enum):
    """How much of a medium is looked at: a store with millions of objects lists them in minutes."""

    NAMES = "names"
    """Which namespaces have blocks."""
    COUNTED = "counted"
    """How many blocks there are: all are listed."""
    RECORDED = "recorded"
    """What is written down about the blocks, such as a store's manifests: read in a moment, and
    without what a writer that died could not write down any more."""


class Reach(enum.Enum):
    """Whose a medium is, which says what commands do with it when no tier is named."""

    HOST = "host"
    """Memory of this machine."""
    MACHINE = "machine"
    """A disk of this machine: `prewarm` fills it."""
    SHARED = "shared"
    """A store that other machines may share: `snapshot` fills it."""


class Stored(msgspec.Struct, kw_only=True):
    """One committed block, as the listing of a backend tells of it."""

    namespace: Namespace
    key: BlockKey
    bytes: int
    """What it takes on the medium."""
    stored_at: float
    """Seconds since 1970."""
    where: str
    """Where a person finds it: a path, an address."""
    at: LoadStoreSpec
    """The same in the words of the medium: its handler loads one block from there."""
    hits: int | None = None
    """How often requests used it; None where nobody counts that."""
    used: float | None = None
    """When one did last."""


class Block(msgspec.Struct, kw_only=True):
    """One committed or quarantined block of a tier."""

    tier: int
    kind: str
    namespace: str
    key: BlockKey
    bytes: int
    stored_at: float
    place: str = ""
    hits: int | None = None
    used: float | None = None
    quarantined: bool = False
    at: LoadStoreSpec | None = None

    @property
    def where(self) -> str:
        """Where a person finds it; there may be millions of whom nobody asks that."""
        return self.place


class Hold(NamedTuple):
    """Somebody who retains a block, and until when."""

    session: str
    until: float
    """Seconds since 1970; infinite, without an end."""


class Part(msgspec.Struct, kw_only=True):
    """What one tier holds of one namespace."""

    tier: int
    kind: str
    namespace: str
    blocks: int = 0
    bytes: int = 0
    """Records with their headers."""
    quarantined: int = 0
    retained: int = 0
    """Those of the blocks that are evicted last, because somebody asked for it."""
    oldest: float | None = None
    newest: float | None = None
    hits: int | None = None
    """How often requests used blocks that are there now; None where nobody counts that."""
    used: float | None = None
    """When one of them was used last."""
    in_use: bool | None = False
    """Whether an engine has it open; None where that cannot be seen, as of a store."""

    def add_times(self, oldest: float, newest: float) -> None:
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
        self.newest = newest if self.newest is None else max(self.newest, newest)

    def add_uses(self, hits: int, used: float) -> None:
        self.hits = hits + (self.hits or 0)
        self.used = max(used, self.used or 0.0) or None


class Cell(NamedTuple):
    """A stretch of neighbouring slots."""

    full: float
    """The share of them that holds something."""
    bad: bool
    """Whether one of them is quarantined."""


class SlotMap(Protocol):
    """The slots of a medium that has some, as `du` draws them."""

    @property
    def name(self) -> str:
        """Whose they are."""

    def cells(self, count: int) -> list[Cell]:
        """All of them, in at most so many stretches."""


class DriveWear(msgspec.Struct, kw_only=True):
    """What one drive says of itself; None and a problem, where it cannot be asked."""

    device: str
    written: int | None = None
    percent_used: int | None = None
    """Of its endurance, as its maker counts that."""
    problem: str = ""


class Writes(msgspec.Struct, kw_only=True):
    """What is known of the writes to a medium that wears."""

    per_day: float | None = None
    """The budget, in bytes."""
    left: float | None = None
    """What may be written now."""
    written: float | None = None
    """Bytes, by all engines and commands with a budget, since `since`."""
    since: float | None = None
    """Seconds since 1970."""
    drives: list[DriveWear] = []


class Contents(msgspec.Struct, kw_only=True):
    """One tier's medium, seen from outside."""

    where: str = ""
    capacity: int | None = None
    """Bytes that the settings allow."""
    used: int = 0
    """Bytes that count against the capacity."""
    free: int | None = None
    """Bytes free on the file system."""
    parts: list[Part] = []
    namespaces: dict[str, Namespace] = {}
    """Those whose description lies there."""
    strangers: list[str] = []
    """Names of what lies there and is not kvtier's."""
    troubles: list[str] = []
    """What could not be read, and what to do."""
    unseen: bool = False
    """Nobody knows what is there: its counts and sums say nothing."""


class Cleared(msgspec.Struct):
    """What became of one tier's part of a namespace, or of one region of host memory; `kept` says
    why it stays."""

    tier: int
    kind: str
    namespace: str
    blocks: int
    bytes: int = 0
    kept: str = ""


class Bar(Protocol):
    """How far something has come."""

    def advance(self, count: int, size: int = 0) -> None:
        """So much more is done."""


class _NoBar:
    def advance(self, count: int, size: int = 0) -> None:
        pass


class Reporter:
    """What an inspector says while it works; here nobody listens."""

    def warn(self, text: str) -> None:
        """What the caller should know, though the work goes on."""

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        """How far something comes that takes a while."""
        yield _NoBar()


class InspectorContext(msgspec.Struct, frozen=True):
    """From where an inspector is asked: the number of its tier, and its stack."""

    tier: int = 0
    engine: str = "default"
    """The stack's name, which private media carry."""
    reporter: Reporter = Reporter()
    """Hears what there is to say meanwhile."""
    retain_share: float = RetainSettings().share
    """How much of each tier of that stack retained blocks may take; 0: nothing is retained."""
