"""Compression of payloads, by name in settings and by number in record headers.

Checksums are of the raw payload, so a codec cannot make wrong bytes right: decoding checks lengths
before it uses them, and what it gives is proved like any other record. All the heavy work runs
without the GIL, so threads compress side by side.
"""

from __future__ import annotations

import enum
import struct
import threading

import numpy as np
import zstandard

from kvtier.errors import FormatError
from kvtier.record.record import Buffer

_LEVEL = 1
_WINDOW_BYTES_MAX = 8 << 20
_PLANE = struct.Struct("<I")


class Codec(enum.IntEnum):
    """How a payload is stored. The numbers are part of the record format: never reuse one."""

    RAW = 0
    ZSTD = 1
    SPLIT_ZSTD = 2
    """For two-byte floats: the even bytes as they are, the odd ones (sign, exponent) by zstd."""


CODEC_NAMES = {"none": Codec.RAW, "zstd": Codec.ZSTD, "split-zstd": Codec.SPLIT_ZSTD}


def codec_for(name: str, dtype: str) -> Codec:
    """The codec of this name; "auto" is what measured best for the data type."""
    if name != "auto":
        return CODEC_NAMES[name]
    if dtype.removeprefix("torch.") in ("bfloat16", "float16", "bf16", "fp16", "half"):
        return Codec.SPLIT_ZSTD
    return Codec.ZSTD


def encode(codec: Codec, payload: Buffer) -> tuple[Codec, list[Buffer]]:
    """The stored form of `payload`, in pieces, and the codec it is in.

    RAW, and the payload itself, where compression would not make it smaller.
    """
    pieces: list[Buffer] = []
    if codec is Codec.ZSTD:
        pieces = [_compress(payload)]
    elif codec is Codec.SPLIT_ZSTD and len(payload) % 2 == 0:
        pairs = np.frombuffer(payload, np.uint8).reshape(-1, 2)
        high = _compress(np.ascontiguousarray(pairs[:, 1]).data)
        low = np.ascontiguousarray(pairs[:, 0]).data
        pieces = [memoryview(_PLANE.pack(len(high))), high, low]
    if not pieces or sum(map(len, pieces)) >= len(payload):
        return Codec.RAW, [payload]
    return codec, pieces


def decode(codec: int, stored: Buffer, into: Buffer) -> None:
    """Write the payload whose stored form this is; raises FormatError unless it fills `into`."""
    if codec == Codec.RAW:
        if len(stored) != len(into):
            raise FormatError(f"a raw payload of {len(stored)} bytes where {len(into)} belong")
        into[:] = stored
    elif codec == Codec.ZSTD:
        _decompress(stored, into)
    elif codec == Codec.SPLIT_ZSTD:
        _join(stored, into)
    else:
        raise FormatError(f"codec {codec} is not one that this kvtier reads")


def _join(stored: Buffer, into: Buffer) -> None:
    half, odd = divmod(len(into), 2)
    high_bytes = _PLANE.unpack_from(stored)[0] if len(stored) >= _PLANE.size else -1
    if odd or len(stored) != _PLANE.size + high_bytes + half:
        raise FormatError("the byte planes of a payload do not have the lengths they must have")
    plane = np.empty(half, np.uint8)
    _decompress(stored[_PLANE.size : _PLANE.size + high_bytes], plane.data)
    pairs = np.frombuffer(into, np.uint8).reshape(-1, 2)
    pairs[:, 0] = np.frombuffer(stored, np.uint8, half, _PLANE.size + high_bytes)
    pairs[:, 1] = plane


class _Contexts(threading.local):
    """zstd contexts are dear to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)


_contexts = _Contexts()


def _compress(raw: Buffer) -> Buffer:
    return memoryview(_contexts.compressor.compress(raw))


def _decompress(frame: Buffer, into: Buffer) -> None:
    """One zstd frame into exactly `into`: a frame that claims another size is never unpacked."""
    try:
        if zstandard.frame_content_size(frame) != len(into):
            raise FormatError("a compressed payload does not have the size it must have")
        with _contexts.decompressor.stream_reader(frame, closefd=False) as reader:
            done = 0
            while done < len(into) and (count := reader.readinto(into[done:])):
                done += count
    except zstandard.ZstdError as error:
        raise FormatError("a compressed payload is damaged") from error
    if done != len(into):
        raise FormatError("a compressed payload ends early")
