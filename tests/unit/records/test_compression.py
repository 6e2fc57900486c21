"""Codecs: every payload comes back, nothing else does, and hostile input is refused."""

from __future__ import annotations

import contextlib
import struct
import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import FormatError
from kvtier.record.codec import CODEC_NAMES, Codec, codec_for, decode, encode


def joined(pieces: list[memoryview]) -> memoryview:
    return memoryview(b"".join(pieces))


def floats(count: int, seed: int = 1) -> memoryview:
    """Two-byte floats as bf16 has them: the high bytes cluster, the low ones are noise."""
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return memoryview(bytearray((values.view(np.uint32) >> 16).astype(np.uint16).tobytes()))


@given(payload=st.binary(max_size=4096), codec=st.sampled_from(list(Codec)))
def test_any_payload_comes_back(payload: bytes, codec: Codec) -> None:
    used, pieces = encode(codec, memoryview(payload))
    stored = joined(pieces)
    into = bytearray(len(payload))
    decode(used, stored, memoryview(into))
    assert into == payload
    assert len(stored) <= len(payload)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.SPLIT_ZSTD])
def test_floats_shrink_and_splitting_wins(codec: Codec) -> None:
    payload = floats(1 << 16)
    used, pieces = encode(codec, payload)
    assert used is codec
    into = bytearray(len(payload))
    decode(used, joined(pieces), memoryview(into))
    assert into == payload


def test_splitting_beats_plain_zstd_on_two_byte_floats() -> None:
    payload = floats(1 << 16)
    split, plain = (sum(map(len, encode(c, payload)[1])) for c in (Codec.SPLIT_ZSTD, Codec.ZSTD))
    assert split < plain < len(payload)


def test_noise_is_stored_raw_and_not_copied() -> None:
    noise = memoryview(np.random.default_rng(2).bytes(1 << 16))
    used, pieces = encode(Codec.ZSTD, noise)
    assert used is Codec.RAW
    assert pieces[0] is noise


@given(stored=st.binary(max_size=256), size=st.integers(0, 512), codec=st.integers(0, 5))
def test_arbitrary_bytes_are_refused_or_fill_exactly(stored: bytes, size: int, codec: int) -> None:
    guard = bytearray(b"\xaa" * (size + 16))
    with contextlib.suppress(FormatError):
        decode(codec, memoryview(stored), memoryview(guard)[:size])
    assert guard[size:] == b"\xaa" * 16


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.SPLIT_ZSTD])
@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_cut_payload_is_refused(codec: Codec, cut: int) -> None:
    payload = floats(4096)
    stored = joined(encode(codec, payload)[1])
    with pytest.raises(FormatError):
        decode(codec, stored[:-cut], memoryview(bytearray(len(payload))))


def test_a_codec_of_times_to_come_is_refused() -> None:
    with pytest.raises(FormatError, match="codec 9"):
        decode(9, memoryview(bytes(8)), memoryview(bytearray(8)))


def test_planes_that_fit_but_for_an_odd_byte_are_refused() -> None:
    payload = floats(512)
    stored = joined(encode(Codec.SPLIT_ZSTD, payload)[1])
    with pytest.raises(FormatError, match="lengths"):
        decode(Codec.SPLIT_ZSTD, stored, memoryview(bytearray(len(payload) + 1)))


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(FormatError, match="size"):
        decode(Codec.ZSTD, memoryview(bomb), memoryview(bytearray(1024)))
    planes = struct.pack("<I", len(bomb)) + bomb + bytes(512)
    with pytest.raises(FormatError, match="size"):
        decode(Codec.SPLIT_ZSTD, memoryview(planes), memoryview(bytearray(1024)))


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(b"a" * 1000))
    honest = zstandard.frame_content_size(bytes(frame))
    at = bytes(frame).index(struct.pack("<H", honest - 256))
    frame[at : at + 2] = struct.pack("<H", honest - 256 + 24)
    with pytest.raises(FormatError):
        decode(Codec.ZSTD, memoryview(frame), memoryview(bytearray(1024)))


def test_many_threads_at_once() -> None:
    failures: list[int] = []

    def work(seed: int) -> None:
        payload = floats(1 << 14, seed)
        for _ in range(10):
            used, pieces = encode(Codec.SPLIT_ZSTD, payload)
            into = bytearray(len(payload))
            decode(used, joined(pieces), memoryview(into))
            if into != payload:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_names_and_the_measured_default() -> None:
    assert codec_for("auto", "torch.bfloat16") is Codec.SPLIT_ZSTD
    assert codec_for("auto", "float16") is Codec.SPLIT_ZSTD
    assert codec_for("auto", "float8_e4m3fn") is Codec.ZSTD
    assert {codec_for(name, "float32") for name in CODEC_NAMES} == set(Codec)
