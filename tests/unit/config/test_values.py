"""Sizes, shares, durations and secrets: what is written is read again, and nothing else passes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.settings import (
    ByteSize,
    Capacity,
    Duration,
    Secret,
    Value,
    dec_hook,
    enc_hook,
    show_hook,
)

SIZES = st.integers(0, 1 << 60)
SECONDS = st.floats(0, 3e9).map(lambda seconds: round(seconds, 9))


@given(SIZES)
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    assert ByteSize.parse(str(ByteSize(size))) == ByteSize(size)
    assert ByteSize.parse(size) == ByteSize.parse(str(size)) == ByteSize(size)


@given(SECONDS)
@example(1e-6)
@example(1.5e-6)
@example(0.3)
@example(86400.0 * 7)
def test_a_duration_is_read_as_it_is_written(seconds: float) -> None:
    assert Duration.parse(str(Duration(seconds))).seconds == seconds
    assert Duration.parse(seconds).seconds == seconds


@given(st.integers(1, 10_000))
@example(10_000)
def test_a_share_is_read_as_it_is_written(hundredths: int) -> None:
    capacity = Capacity.parse(f"{hundredths / 100:g}%")
    assert capacity.resolve(1_000_000) in (hundredths * 100, hundredths * 100 - 1)
    assert Capacity.parse(str(capacity)) == capacity
    assert Capacity.parse(f" {hundredths / 100:g} % ") == capacity


@pytest.mark.parametrize("text", ["0.00001%", "0.000000000025%"])
def test_a_share_of_a_very_large_medium_is_read_as_it_is_written(text: str) -> None:
    assert str(Capacity.parse(text)) == text
    assert Capacity.parse(str(Capacity.parse(text))) == Capacity.parse(text)


@given(st.text() | st.floats() | st.none() | st.booleans() | st.lists(st.integers()))
def test_anything_is_a_value_or_a_mistake_that_says_what_is_right(value: object) -> None:
    for kind in (ByteSize, Capacity, Duration):
        try:
            found = kind.parse(value)
        except ValueError as error:
            problem, separator, remedy = str(error).partition("; ")
            assert problem
            assert separator
            assert remedy
        else:
            assert kind.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GiB", 3 << 29),
        ("64 GiB", 64 << 30),
        ("2TB", 2 * 10**12),
        ("7", 7),
        ("0B", 0),
        (f"{2**63 - 1}", 2**63 - 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize.parse(text).bytes == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (999, "999B"), (1024, "1KiB"), (3 << 29, "1536MiB"), (3 * 10**12, "3TB")],
)
def test_sizes_are_shown_in_their_largest_whole_unit(size: int, text: str) -> None:
    assert str(ByteSize(size)) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (9000, "9KB"), (25_276_502_016, "23GiB"), (25_165_824, "24MiB")],
)
def test_a_short_size_within_another(size: int, text: str) -> None:
    assert str(ByteSize.within(size)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (90, "90s"), (120, "2min"), (1.5, "1500ms"), (1.5e-6, "0.0000015s")],
)
def test_durations_are_shown_in_their_largest_whole_unit(seconds: float, text: str) -> None:
    assert str(Duration(seconds)) == text


@given(SIZES)
def test_a_short_size_is_no_more_and_not_much_less(size: int) -> None:
    assert 0 <= size - ByteSize.within(size).bytes <= size / 10


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("64gb", 'did you mean "64GB"?'),
        ("64g", 'did you mean "64GiB"?'),
        ("64m", 'did you mean "64MiB"?'),
        ("64gib", 'did you mean "64GiB"?'),
        ("1e9", 'B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, like "64GiB"'),
        ("GiB", "KiB"),
        ("", "KiB"),
        ("٣GiB", "KiB"),
        ("9" * 19, "2**63"),
        ("9" * 99, "KiB"),
    ],
)
def test_what_is_no_size(value: str, hint: str) -> None:
    with pytest.raises(ValueError, match="; ") as caught:
        ByteSize.parse(value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "-1 is negative"),
        ("-1B", "'-1B' is negative"),
        (1 << 63, "9223372036854775808 is too large"),
        (10**30, "1000000000000000000000000000000 is too large"),
        ("8388608TiB", "'8388608TiB' is too large"),
    ],
)
def test_a_size_that_cannot_be_is_shown_as_it_was_written(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}; a size is"):
        ByteSize.parse(value)


@pytest.mark.parametrize(
    "value",
    [
        True,
        ["5s"],
        "5",
        "5 Hours",
        "1month",
        "inf",
        -1,
        float("inf"),
        float("nan"),
        10**40,
        "9" * 20 + "d",
    ],
)
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(ValueError, match="; "):
        Duration.parse(value)


def test_a_mistake_is_told_in_few_words() -> None:
    with pytest.raises(ValueError, match=r'us, ms, s, min, h, d, like "250ms"$') as caught:
        Duration.parse("x" * 10_000)
    assert len(str(caught.value)) < 250
    with pytest.raises(ValueError, match=r"^a mapping is not a duration"):
        Duration.parse({"s": 5})


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("5 seconds", "5s"),
        ("1 sec", "1s"),
        ("2 mins", "2min"),
        ("5m", "5min"),
        ("3 hours", "3h"),
        ("1Day", "1d"),
    ],
)
def test_what_a_duration_means(value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f'did you mean "{meant}"'):
        Duration.parse(value)


@pytest.mark.parametrize("value", ["0%", "100.1%", "-5%", "nan%", "%", "5GiB%"])
def test_what_is_no_share(value: str) -> None:
    with pytest.raises(ValueError, match="; "):
        Capacity.parse(value)


def test_a_secret_is_shown_nowhere() -> None:
    secret = Secret.parse("hunter2")
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2") != Secret("hunter3")
    assert "hunter2" not in f"{secret} {secret!r} {show_hook(secret)}"
    assert hash(secret) == hash(Secret("hunter2"))
    for bad in ("", 5, None):
        with pytest.raises(ValueError, match="a secret is text; "):
            Secret.parse(bad)


class Everything(msgspec.Struct):
    """One of each."""

    size: ByteSize
    capacity: Capacity
    duration: Duration
    secret: Secret
    path: Path


def test_settings_cross_to_another_process_and_back() -> None:
    before = Everything(
        ByteSize(5), Capacity(share=0.5), Duration(0.25), Secret("hunter2"), Path("/x")
    )
    data = msgspec.msgpack.encode(before, enc_hook=enc_hook)
    assert msgspec.msgpack.decode(data, type=Everything, dec_hook=dec_hook) == before


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert dec_hook(Path, "~/kv") == Path("/home/me/kv")
    for bad in ("", 5, "a\0b"):
        with pytest.raises(ValueError, match="; "):
            dec_hook(Path, bad)


def test_values_of_different_kinds_differ() -> None:
    values: list[Value] = [ByteSize(1), Capacity(ByteSize(1)), Duration(1), Secret("1B")]
    assert len(set(values)) == 4
