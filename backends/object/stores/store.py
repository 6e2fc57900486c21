"""The interface of every object store, and the guarantees that it gives.

A name is a path of plain segments and is the same on every store, so a prefix can be copied from
one kind of store to another. Every call may block, and any thread may make it.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kvtier.backends.object.object_names import description_name
from kvtier.backends.object.stores.errors import (
    EndlessListing,
    InvalidName,
    LengthMismatch,
    StoreError,
    Unavailable,
)
from kvtier.types import NAMESPACE_BYTES_MAX, Namespace

Buffer = memoryview
_Listed = TypeVar("_Listed")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_PARALLEL = 8

_SEGMENT = r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,199}"
_NAME = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,15}}")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/){{0,16}}(?:{_SEGMENT})?")
NAME_CHARS_MAX = 700
OBJECT_BYTES_MAX = (1 << 63) - 1
LISTED_MAX = 1 << 25
"""The longest listing, so that one without an end is ended, too. The manifests of a namespace can
hold half as many entries, and no store lists so many objects between two audits."""
NAMESPACES_MAX = 1 << 16
CRASHED_S = 3600.0
"""A temporary file that has not been touched for so long has no writer any more."""
OWN_PREFIX = (
    "write a url whose prefix is kvtier's own, and see that the endpoint lists nothing twice"
)


class PutOutcome(enum.Enum):
    STORED = "stored"
    ALREADY_THERE = "already_there"
    """Someone else's object has this name; ours was not written."""


class ObjectInfo(msgspec.Struct, frozen=True, gc=False):
    """What a store says about one object; `modified_s` is by the store's own clock."""

    name: str
    size: int
    modified_s: float


class Store(ABC):
    """A flat space of whole, immutable objects.

    Guarantees, checked by the contract suite against every implementation:

    - an object is visible under its name only when all of its bytes are there; a reader sees one
      whole version or none;
    - a call ends by `deadline` (seconds of `time.monotonic`; the store's own total limit where it
      is None), or it raises `TimedOut`. Only a blocking file system can delay a `FileStore` longer;
    - it raises nothing but `StoreError`, and no message contains a credential;
    - nothing outside the prefix or folder is ever written, read or deleted;
    - bytes are NOT proved: a store may return anything of the right length. The caller checks.
    """

    @abstractmethod
    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        """Write one object that consists of these buffers, one after the other.

        With `if_absent`, a store that can refuse returns STORED to at most one writer of a name.
        On a store that cannot, the last writer wins, and each gets STORED. Buffers are read in
        place, and a retry may send them again. After `TimedOut` they may still be read for a while:
        an object that such an upload leaves behind may have any bytes.
        """

    @abstractmethod
    def get(
        self,
        name: str,
        into: Buffer,
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        """Read an object into this buffer, without a copy. Returns how many bytes were read, None
        if there is no such object.

        Without `offset` the object may be shorter than the buffer. With one it must have as many
        bytes from there on, at least one. Any other size raises `LengthMismatch`. After an error
        the content of the buffer is undefined.
        """

    @abstractmethod
    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        """Size and age of one object, None if there is none. To ask for many names, use `list`."""

    @abstractmethod
    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects whose name starts with `prefix` and sorts after `after`, in order of names.

        They are fetched page by page. Objects that are written or deleted meanwhile may or may not
        appear. Names that kvtier cannot have written are left out.
        """

    @abstractmethod
    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        """Delete these objects; returns those that could not be deleted. One that is not there
        counts as deleted."""

    @property
    def deletes_at_once(self) -> int:
        """How many names one call of `delete` should have, to end soon, as far as that is known."""
        return 1000

    def sweep(self, older_than_s: float) -> Iterator[int]:
        """Remove what dead writers left unfinished, if it is that old. Yields how much that was,
        folder by folder. A bucket has nothing unfinished."""
        return iter(())

    def close(self) -> None:  # noqa: B027 - not every store holds something
        """Release connections. The objects stay."""


def check_name(name: str) -> str:
    """`name`, or InvalidName: the same rule on every store, so that none can be tricked."""
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise InvalidName(f"not an object name of kvtier: {name[:80]!r}")
    return name


def check_prefix(prefix: str) -> str:
    """`prefix`, or InvalidName: a path whose last segment may be unfinished."""
    if len(prefix) > NAME_CHARS_MAX or not _PREFIX.fullmatch(prefix):
        raise InvalidName(f"not a prefix of object names of kvtier: {prefix[:80]!r}")
    return prefix


def is_name(name: str) -> bool:
    """Whether kvtier could have written an object of this name."""
    return len(name) <= NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def in_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The results in order, several items at once. If `work` raises, so does this, and no further
    item is begun. Raises Unavailable if no thread can be started: there are too many, or the
    interpreter ends."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_PARALLEL, len(items)), "kvtier-requests") as threads:
        try:
            results = threads.map(work, items)
        except RuntimeError as error:
            raise Unavailable(f"no thread can be started: {error}") from error
        return list(results)


def bounded(
    listed: Iterable[_Listed], most: int, what: str, remedy: str = OWN_PREFIX
) -> Iterator[_Listed]:
    """The same items; raises EndlessListing after `most` of them."""
    for count, one in enumerate(listed, 1):
        if count > most:
            raise EndlessListing(f"more than {most} {what} are listed: {remedy}")
        yield one


def check_namespaces(listed: Sized) -> None:
    """Raises EndlessListing if there are too many namespaces."""
    if len(listed) > NAMESPACES_MAX:
        raise EndlessListing(f"more than {NAMESPACES_MAX} namespaces are listed: {OWN_PREFIX}")


def read_description(store: Store, namespace: str) -> Namespace | None:
    """The description of a namespace; None if there is none, or none that fits its id."""
    text = memoryview(bytearray(NAMESPACE_BYTES_MAX))
    try:
        length = store.get(description_name(namespace), text)
        found = Namespace.from_json(bytes(text[: length or 0]))
    except (LengthMismatch, msgspec.ValidationError):
        return None
    return found if found.id == namespace else None


def wrong_length(name: str, found: int) -> LengthMismatch:
    """The error for an object that is not as long as the reader expected."""
    return LengthMismatch(f"{name} has {found} bytes, which is not what was expected")
