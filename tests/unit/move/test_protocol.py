"""What crosses between a mover's process and its parent is checked before it is believed."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.movers.media import FileSpec, HostSpec

from kvtier.errors import MoverError
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.move import protocol
from kvtier.move.protocol import (
    Answer,
    Cancel,
    Failed,
    Inbox,
    Submit,
    TransferEnded,
    answers,
    frame,
    requests,
)
from kvtier.testing.subject import make_keys
from kvtier.types import Outcome

TRANSFER = Transfer(
    id=7,
    kind=TransferKind.LOAD,
    source=1,
    target=0,
    keys=make_keys(3),
    source_spec=FileSpec([4, 5, 6]),
    target_spec=HostSpec([1, 2, 3]),
    deadline=12.5,
)
RESULT = TransferResult(
    id=7, outcomes=[Outcome.OK, Outcome.CORRUPT], bytes_moved=5, seconds=1.0, busy_seconds=0.5
)


@given(st.lists(st.integers(1, 40), max_size=20))
def test_frames_come_together_from_any_pieces(cuts: list[int]) -> None:
    sent: list[Answer] = [
        TransferEnded([RESULT]),
        TransferEnded([]),
        TransferEnded([RESULT, RESULT]),
    ]
    data = b"".join(bytes(frame(message)) for message in sent)
    inbox = Inbox()
    received: list[Answer] = []
    for cut in [*cuts, len(data)]:
        received += inbox.feed(data[:cut], answers)
        data = data[cut:]
    assert received == sent


def test_a_transfer_crosses_with_the_types_of_its_tiers() -> None:
    (message,) = Inbox().feed(bytes(frame(Submit.of(TRANSFER))), requests)
    assert isinstance(message, Submit)
    decoders: list[msgspec.msgpack.Decoder[Any]] = [
        msgspec.msgpack.Decoder(HostSpec),
        msgspec.msgpack.Decoder(FileSpec),
    ]
    assert message.read(decoders) == TRANSFER
    with pytest.raises(msgspec.ValidationError):
        message.read(decoders[::-1])


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_and_never_anything_else(body: bytes) -> None:
    data = struct.pack("<I", len(body)) + body
    try:
        received = list(Inbox().feed(data, requests))
    except MoverError:
        return
    assert all(isinstance(message, Submit | Cancel) for message in received)


def test_a_text_that_is_no_utf8_is_garbage_too() -> None:
    body = bytes(frame(Failed("no disk"))).replace(b"Failed", b"Fai\xffed")
    with pytest.raises(MoverError, match="cannot be read"):
        list(Inbox().feed(body, answers))


def test_a_length_beyond_reason_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(MoverError, match="no message of a mover"):
        list(Inbox().feed(struct.pack("<I", 1 << 31), answers))


def test_a_message_too_long_for_a_frame_is_the_callers_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 10)
    with pytest.raises(ValueError, match="at most 10 bytes"):
        frame(Cancel(list(range(1000))))
