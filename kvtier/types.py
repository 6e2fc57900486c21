"""The words the whole house speaks: keys, namespaces, outcomes, specs, plans' results."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, NewType, Self

import msgspec

from kvtier.errors import UNREADABLE

BlockKey = NewType("BlockKey", bytes)
"""Names one chunk: its hash followed by the four-byte index of its cache group."""

KEY_BYTES_MAX = 40
GROUP_BYTES = 4


def block_key(block_hash: bytes, group: int = 0) -> BlockKey:
    """Join a block hash and a group index into the key that every tier uses."""
    if not isinstance(block_hash, bytes):
        raise TypeError(f"a block hash is bytes, as hashlib's digest(), not {block_hash!r:.40}")
    if not 0 < len(block_hash) <= KEY_BYTES_MAX - GROUP_BYTES:
        raise ValueError(f"a block hash has 1 to {KEY_BYTES_MAX - GROUP_BYTES} bytes")
    if not 0 <= group < GROUPS_MAX:
        raise ValueError(f"the index of a cache group is 0 to {GROUPS_MAX - 1}, not {group}")
    return BlockKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def checked_keys(keys: Iterable[object]) -> list[BlockKey]:
    """Each of these once; raises if one could not come from `block_key`."""
    if isinstance(keys, bytes | str):
        raise TypeError("several keys are asked for: put a single one into a list")
    found: dict[BlockKey, None] = {}
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"{key!r:.40} is no key: make keys with kvtier.block_key")
        if not GROUP_BYTES < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key of {len(key)} bytes: make keys with kvtier.block_key")
        found[BlockKey(key)] = None
    return list(found)


def group_of(key: BlockKey) -> int:
    """The cache group a key belongs to."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


PARTS_MAX = 256
ANY_DEGREE = "any"
"""The fact `tensor_parallel` of a namespace whose blocks ranks of any number share."""
GROUPS_MAX = 1024
"""Far more than any model has: for each of them a chunk of a prompt has a key."""
PAYLOAD_BYTES_MAX = 1 << 32
"""Far more than a block of any model: whoever can write a description chooses its sizes, and with
them what its readers make room for."""
NAMESPACE_BYTES_MAX = 1 << 20
"""A description of a namespace that is longer is none of ours."""


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes bytes interchangeable: equal digests mean equal meaning of bytes.

    `facts` are named strings (model, weights, dtype, layout, hash algorithm, ...). The geometry
    is part of the identity too: the payload of a block of cache group `g` has `group_bytes[g]`
    bytes (the last entry counts for every group beyond it) and is written in `parts` equal parts,
    one by each rank. Where `parts` is None, each record says in how many: engines of any
    tensor-parallel size write them.
    """

    facts: dict[str, str]
    group_bytes: tuple[int, ...]
    parts: int | None = 1

    def __post_init__(self) -> None:
        for name, value in self.facts.items():
            if not isinstance(value, str):
                raise ValueError(f"the fact {name!r} is no text: write {str(value)!r}")
        if not self.group_bytes or min(self.group_bytes) <= 0:
            raise ValueError("group_bytes must name at least one positive payload size")
        if len(self.group_bytes) > GROUPS_MAX:
            raise ValueError(f"there are at most {GROUPS_MAX} cache groups")
        if self.payload_bytes > PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"a payload has at most {PAYLOAD_BYTES_MAX} bytes, not {self.payload_bytes}: let a "
                "block hold fewer tokens"
            )
        if self.parts is None:
            return
        if not 1 <= self.parts <= PARTS_MAX:
            raise ValueError(f"parts must be between 1 and {PARTS_MAX}")
        if any(size % self.parts for size in self.group_bytes):
            raise ValueError("every payload size must be a multiple of parts")

    @property
    def model(self) -> str:
        """The model's name, without the folders in which it lies; "" if no fact says it."""
        return self.facts.get("model", "").rstrip("/").rpartition("/")[2]

    @property
    def payload_bytes(self) -> int:
        """The largest payload: what a slot must have room for."""
        return max(self.group_bytes)

    def payload_of(self, key: BlockKey) -> int:
        """The payload size of this key's group."""
        sizes = self.group_bytes
        return sizes[min(group_of(key), len(sizes) - 1)]

    @property
    def digest(self) -> bytes:
        """Sixteen bytes that stand for this namespace on every medium."""
        return hashlib.sha256(self.to_json()).digest()[:16]

    @property
    def id(self) -> str:
        """The digest in hexadecimal: a folder name."""
        return self.digest.hex()

    def to_json(self) -> bytes:
        """Canonical, readable JSON: the form that lies beside the data."""
        body = {
            "facts": dict(sorted(self.facts.items())),
            "group_bytes": self.group_bytes,
            "parts": self.parts,
        }
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` wrote; raises `msgspec.ValidationError` on anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except UNREADABLE as error:
            raise msgspec.ValidationError(str(error)) from None

    def differences(self, other: Namespace) -> list[Difference]:
        """Field by field, what keeps this namespace and another one apart."""
        mine, theirs = self._flat(), other._flat()
        return [
            Difference(name, mine.get(name), theirs.get(name))
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]

    def _flat(self) -> dict[str, str]:
        sizes = ",".join(str(size) for size in self.group_bytes)
        return {**self.facts, "group_bytes": sizes, "parts": str(self.parts or "any")}


class Difference(msgspec.Struct, frozen=True):
    """One fact in which two namespaces differ; None where one of them does not state it."""

    fact: str
    mine: str | None
    theirs: str | None

    def __str__(self) -> str:
        return f"{self.fact}: {self.mine or '(not set)'} here, {self.theirs or '(not set)'} there"


class Presence(enum.Enum):
    """What a tier knows of a key, answered from memory."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """On its way in: it will be a hit or a miss soon."""


class Outcome(enum.Enum):
    """How the transfer of one block ended."""

    OK = "ok"
    GONE = "gone"
    """The medium no longer holds this key (evicted or deleted meanwhile): an ordinary miss."""
    CORRUPT = "corrupt"
    """Header or checksum do not prove these bytes to be the key's: quarantine."""
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    """Never started: the queue was full, the mover went away, or what was to be written elsewhere
    could not be read."""

    @property
    def ok(self) -> bool:
        return self is Outcome.OK


class LoadStoreSpec(msgspec.Struct, tag=True):
    """Where blocks are on one medium, in the words of that medium.

    Columns, not rows: one spec describes many blocks, and `len` counts them. Crosses processes as
    msgpack, never as pickle.
    """

    medium: ClassVar[str] = ""

    def __len__(self) -> int:
        raise TypeError("each medium's spec counts its own blocks")

    def select(self, start: int, stop: int) -> Self:
        """The blocks `start:stop` of this spec."""
        raise TypeError("each medium's spec slices its own columns")

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        """One spec of the blocks of all these pieces, in their order."""
        raise TypeError("each medium's spec joins its own columns")


class SlotSpec(LoadStoreSpec):
    """Numbered slots, on media where that says all."""

    slots: list[int]

    def __len__(self) -> int:
        return len(self.slots)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.slots[start:stop])

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls([slot for piece in pieces for slot in piece.slots])


class FilePlace(NamedTuple):
    """A record in a local file, as it is: any process of this machine may read it there."""

    path: str
    at: int


class EventKind(enum.Enum):
    """What happened to a block in a tier."""

    STORED = "stored"
    REMOVED = "removed"


class MissReason(enum.Enum):
    """Why the first block that a request did not find was not there for it; a label of metrics, and
    a sentence for people."""

    NOT_COMPUTED = "not_computed", "nothing shows that it was ever computed here"
    EVICTED = "evicted", "the last tier that had it needed the room"
    NOT_WRITTEN = "not_written", "it left a tier without having been written to the one below"
    NOT_STORED = "not_stored", "it is being computed, or its request ended before it was stored"
    REMOVED = "removed", "it was removed on purpose"
    RESET = "reset", "the caches were emptied since, because the weights may be others"
    CORRUPT = "corrupt", "it did not verify, and is not served"
    LOAD_FAILED = "load_failed", "it could not be read"
    LOAD_LATE = "load_late", "its load took longer than it may, or than computing"
    DECLINED = "declined", "it is there, and computing it is quicker than loading it"
    NO_ROOM = "no_room", "it is there, and there was no room for its load"
    UNREACHABLE = "unreachable", "the tier that may have it is not asked now"
    OTHER_NAMESPACE = "other_namespace", "it is stored under another namespace of the same model"
    OTHER_SALT = "other_salt", "it was computed for another cache salt"
    OTHER_ADAPTER = "other_adapter", "it was computed for another LoRA adapter, or without one"
    NO_STATE = "no_state", "the model's windows or states were not kept at that token"
    UNTRUSTED = "untrusted", "nothing is looked up for the request: its keys do not tell enough"

    def __init__(self, label: str, sentence: str) -> None:
        self.label = label
        self.sentence = sentence


class Fate(enum.Enum):
    """What became of a block in a tier, or of the attempt to write it there."""

    FOR_STORE = "store", MissReason.EVICTED, "for what the engine stored"
    FOR_LOAD = "load", MissReason.EVICTED, "for the load of another request"
    FOR_PREFETCH = "prefetch", MissReason.EVICTED, "for what was prefetched"
    FOR_WRITE = "write", MissReason.EVICTED, "for what came from the tier above"
    FOR_CAPACITY = "capacity", MissReason.EVICTED, "to keep to its capacity, or to share it"
    ELSEWHERE = "elsewhere", MissReason.EVICTED, "by the engine or server in charge of it"
    REMOVED = "removed", MissReason.REMOVED, "by a command, or by the program that uses the stack"
    CORRUPT = "corrupt", MissReason.CORRUPT, "its header or checksum was wrong"
    UNREADABLE = "unreadable", MissReason.LOAD_FAILED, "an error of the medium"
    NOT_ADMITTED = "admission", MissReason.NOT_WRITTEN, "it had not been used twice"
    BUDGET = "budget", MissReason.NOT_WRITTEN, "others were worth more of the write budget"
    FULL = "full", MissReason.NOT_WRITTEN, "too many blocks waited to be written"
    GONE = "gone", MissReason.NOT_WRITTEN, "it was evicted above before its turn came"
    DOWN = "down", MissReason.NOT_WRITTEN, "the tier failed"
    REFUSED = "refused", MissReason.NOT_WRITTEN, "the mover's queue was full"
    LACKS_ROOM = "no_room", MissReason.NOT_WRITTEN, "the tier had no room"
    FAILED = "failed", MissReason.NOT_WRITTEN, "its write failed"

    def __init__(self, label: str, reason: MissReason, how: str) -> None:
        self.label = label
        self.reason = reason
        self.how = how

    @property
    def unwritten(self) -> bool:
        """Whether the tier never had the block."""
        return self.reason is MissReason.NOT_WRITTEN


class TierEvent(msgspec.Struct, frozen=True):
    """Blocks that became visible in a medium, or stopped being so."""

    kind: EventKind
    medium: str
    keys: tuple[BlockKey, ...]


class Reservation(msgspec.Struct):
    """What a tier will take of the keys offered to it, in their order, and where they go."""

    keys: list[BlockKey]
    spec: LoadStoreSpec
    evicted: list[BlockKey]


class TierStats(msgspec.Struct):
    """Counters and gauges of one tier; counters only grow."""

    medium: str
    blocks: int = 0
    bytes_used: int = 0
    bytes_capacity: int = 0
    free: int = 0
    """Blocks that can be reserved before any is evicted."""
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    neighbour_loads: int = 0
    """Blocks that were read from what another engine of the machine owns."""
    pinned: int = 0
    in_flight: int = 0
    quarantined: int = 0
    retained: int = 0
    """Blocks that are evicted last, because somebody asked for it; once they are there."""
    retain_refused: int = 0
    """Blocks that were to be retained, and for which there was no place, or none any more."""
    released: int = 0
    """Blocks that were retained until their session was over."""
