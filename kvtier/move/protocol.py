"""What the mover's process and its parent say to each other: frames of msgpack, checked in length.

Settings cross as JSON by their kind and specs as msgpack; each is decoded with the types of the
backend that brings them, so that nothing but data ever crosses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import msgspec

from kvtier.errors import UNREADABLE, MoverError
from kvtier.interfaces.backend import TierContext, backend
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.settings import TierSettings, dec_hook, enc_hook
from kvtier.types import BlockKey, LoadStoreSpec

FRAME_BYTES_MAX = 64 << 20

_LENGTH = struct.Struct("<I")

M = TypeVar("M")


class TierOpening(msgspec.Struct):
    """A tier's settings, to be decoded with the backend of its kind."""

    kind: str
    settings: bytes

    @classmethod
    def of(cls, settings: TierSettings) -> Self:
        """What crosses for these settings."""
        return cls(settings.kind, msgspec.json.encode(settings, enc_hook=enc_hook))

    def read(self) -> TierSettings:
        """The settings again; raises BackendError or `msgspec.ValidationError`."""
        kind: type[TierSettings] = backend(self.kind).settings
        return msgspec.json.decode(self.settings, type=kind, dec_hook=dec_hook)


class Hello(msgspec.Struct, tag=True):
    """The first thing a mover's process hears: what to open."""

    context: TierContext
    tiers: list[TierOpening]
    staging_bytes: int
    log_level: int
    prefetch_share: float = 0.5


class Ready(msgspec.Struct, tag=True):
    """Everything is open; for each tier, whether its medium is host memory, and how long a call
    of its handler takes at most for a transfer of each kind."""

    host: list[bool]
    call_seconds: dict[TransferKind, list[float]]


class Failed(msgspec.Struct, tag=True):
    """The tiers cannot be opened, and why."""

    problem: str


class Submit(msgspec.Struct, tag=True):
    """A transfer; its specs are still encoded, because the tiers say which types they have."""

    id: int
    kind: TransferKind
    source: int
    target: int
    keys: list[BlockKey]
    source_spec: msgspec.Raw
    target_spec: msgspec.Raw
    deadline: float
    prove: bool
    prefetch: bool

    @classmethod
    def of(cls, transfer: Transfer) -> Self:
        """What crosses for a transfer."""
        return cls(
            transfer.id,
            transfer.kind,
            transfer.source,
            transfer.target,
            list(transfer.keys),
            msgspec.Raw(_encoder.encode(transfer.source_spec)),
            msgspec.Raw(_encoder.encode(transfer.target_spec)),
            transfer.deadline,
            transfer.prove,
            transfer.prefetch,
        )

    def read(self, specs: Sequence[msgspec.msgpack.Decoder[LoadStoreSpec]]) -> Transfer:
        """The transfer again; raises `msgspec.DecodeError` on specs of other tiers."""
        return Transfer(
            id=self.id,
            kind=self.kind,
            source=self.source,
            target=self.target,
            keys=self.keys,
            source_spec=specs[self.source].decode(self.source_spec),
            target_spec=specs[self.target].decode(self.target_spec),
            deadline=self.deadline,
            prove=self.prove,
            prefetch=self.prefetch,
        )


class Cancel(msgspec.Struct, tag=True):
    """Stop caring about these transfers."""

    ids: list[int]


class Hasten(msgspec.Struct, tag=True):
    """Somebody waits for these prefetches now."""

    ids: list[int]


class TransferEnded(msgspec.Struct, tag=True):
    """Transfers that ended."""

    results: list[TransferResult]


Request = Hello | Submit | Cancel | Hasten
Answer = Ready | Failed | TransferEnded

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Answer) -> bytearray:
    """A message as it goes over the socket; raises ValueError if it is too long for one frame."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    length = len(buffer) - _LENGTH.size
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a message has at most {FRAME_BYTES_MAX} bytes, not {length}")
    _LENGTH.pack_into(buffer, 0, length)
    return buffer


class Inbox:
    """Puts frames together again from whatever pieces the socket gives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes, decoder: msgspec.msgpack.Decoder[M]) -> Iterator[M]:
        """The messages that are complete now; raises MoverError on anything else than messages."""
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, start)
                if length > FRAME_BYTES_MAX:
                    raise MoverError(f"a frame of {length} bytes is no message of a mover")
                end = start + _LENGTH.size + length
                if end > len(self._bytes):
                    return
                message = decoder.decode(bytes(self._bytes[start + _LENGTH.size : end]))
                start = end
                yield message
        except UNREADABLE as error:
            raise MoverError(f"a message of a mover cannot be read: {error}") from error
        finally:
            del self._bytes[:start]
