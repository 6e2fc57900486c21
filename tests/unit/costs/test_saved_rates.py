"""What one run tells the next: how it is kept, and what a model makes of it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel
from kvtier.cost.rates import (
    BYTES_MAX,
    DEVICE,
    PAGEABLE,
    LoadRun,
    Owner,
    Rates,
    SavedLink,
    SavedPrefill,
    decode,
    encode,
)
from kvtier.cost.saved_rates import FILES_MAX, RateKeeper, RatesFile, rates_in

GIB = 1 << 30
OWNER = Owner("this machine", "a device", "a model", "a stack")
RATES = Rates(
    {"nvme": SavedLink(0.001, 0.7), DEVICE: SavedLink(0.0001, 0.02), PAGEABLE: SavedLink(0.0, 0.1)},
    SavedPrefill(0.025, 0.0001, 8192),
)
CHUNK, CHUNK_BYTES = 256, 32 << 20


def taught(clock: Clock, disk: float = 1.4e9) -> CostModel:
    """Of a disk, pinned and pageable memory, and an engine of 40,000 tokens a second."""
    model = CostModel(clock=clock)
    for at, size in enumerate([CHUNK_BYTES, 32 * CHUNK_BYTES] * 10):
        clock.now += 10.0
        model.observe_load("nvme", size, 0.0005 + size / disk)
        model.observe_memory(at % 4 < 2)
        clock.now += 10.0
        model.observe_load(DEVICE, size, 0.0001 + size / (50e9 if at % 4 < 2 else 8e9))
        model.observe_prefill(8192, 8192 * 25e-6, at % 3 * 8192)
    model.publish()
    return model


def recalled(rates: Rates, clock: Clock) -> CostModel:
    model = CostModel(clock=clock)
    model.recall(rates)
    return model


def test_a_model_begins_with_what_an_earlier_one_knew() -> None:
    clock = Clock()
    before = taught(clock)
    before.observe_memory(True)
    after = recalled(before.latest, clock)
    for link in ("nvme", DEVICE):
        for size in (CHUNK_BYTES, GIB):
            seconds = before.load_seconds(link, size)
            assert after.load_seconds(link, size) == pytest.approx(seconds, rel=1e-6)
    after.observe_memory(False)
    assert after.load_seconds(DEVICE, GIB) == pytest.approx(GIB / 8e9, rel=0.05), "as it was, too"
    assert after.recompute_seconds(0, 8192) == pytest.approx(8192 * 25e-6, rel=0.05)
    assert after.latest == Rates()
    after.publish()
    assert after.latest == before.latest, "told on as it was"


def test_what_no_longer_holds_is_learned_anew_within_a_few_samples() -> None:
    clock = Clock()
    model = recalled(taught(clock).latest, clock)
    for _ in range(2):
        model.observe_load("nvme", GIB, GIB / 14e9)
        model.observe_prefill(8192, 8192 * 250e-6)
    assert model.load_seconds("nvme", GIB) == pytest.approx(GIB / 14e9, rel=0.3)
    assert model.recompute_seconds(0, 8192) == pytest.approx(8192 * 250e-6, rel=0.1)
    for _ in range(4):
        model.observe_prefill(8192, 8192 * 170e-6)
    assert model.recompute_seconds(0, 8192) == pytest.approx(8192 * 170e-6, rel=0.15)


def test_the_first_hit_after_a_start_is_no_gamble() -> None:
    """A disk of a third of the engine's speed: without word of that, all of the hit is taken."""
    hit = [LoadRun("nvme", 32, 32 * CHUNK_BYTES)]
    clock = Clock()
    assert CostModel(clock=clock).admit(hit, CHUNK) == 32
    slow = recalled(taught(clock).latest, clock)
    assert [slow.admit(hit, CHUNK) for _ in range(50)] == [0] * 50
    assert slow.choose([], 0) == -1
    fast = recalled(taught(clock, disk=14e9).latest, clock)
    assert fast.admit(hit, CHUNK) == 32
    near = recalled(taught(clock).latest, clock)
    assert near.admit([LoadRun(DEVICE, 32, 32 * CHUNK_BYTES)], CHUNK) == 32


def test_those_who_wait_count_where_a_link_is_known_from_before() -> None:
    clock = Clock()
    model = recalled(taught(clock).latest, clock)
    model.observe_waiting(5)
    assert model.admit([LoadRun("nvme", 32, 32 * CHUNK_BYTES)], CHUNK) == 32


def test_files_are_for_their_owner_and_only_one_of_each(tmp_path: Path) -> None:
    folder = tmp_path / "kvtier" / "rates"
    file, other = RatesFile(folder, OWNER), RatesFile(folder, Owner("m", "d", "m", "s"))
    file.write(Rates())
    file.write(RATES)
    other.write(Rates())
    assert file.read().rates == RATES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    assert {each.name for each in folder.iterdir()} == {file.path.name, other.path.name}
    assert len(list(rates_in(folder))) == 2
    other.path.replace(file.path)
    with pytest.raises(ValueError, match="another machine"):
        file.read()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 10_000,
        b"\xff\xfe",
        encode(OWNER, RATES)[:-20],
        encode(OWNER, RATES).replace(b"0.7", b"1e999"),
        encode(OWNER, RATES).replace(b"0.7", b"-1"),
        encode(OWNER, RATES).replace(b"0.7", b"4e3"),
        encode(OWNER, RATES).replace(b"0.025", b"0"),
        encode(OWNER, RATES).replace(b'"version": 1', b'"version": 2'),
        encode(OWNER, RATES).replace(b'"nvme"', b'"nv\\nme"'),
        encode(OWNER, Rates(dict.fromkeys(map(str, range(33)), SavedLink(0.0, 0.1)))),
        encode(OWNER, RATES) + b" " * BYTES_MAX,
    ],
    ids=[
        *("empty", "nested", "no text", "torn", "endless", "negative", "an hour", "nothing"),
        *("of another version", "a name in two lines", "too many", "too long"),
    ],
)
def test_nothing_else_is_believed(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"more than|not what"):
        decode(text)
    file = RatesFile(tmp_path, OWNER)
    file.path.write_bytes(text)
    model = CostModel(clock=Clock())
    RateKeeper(file, model).close()
    assert model.stats()[DEVICE].samples == 0
    assert "not known" in caplog.text


def test_numbers_at_the_ends_of_their_ranges_break_nothing() -> None:
    for seconds in (0.0, 3600.0):
        links = {"nvme": SavedLink(seconds, seconds), DEVICE: SavedLink(seconds, seconds)}
        model = recalled(Rates(links, SavedPrefill(1e-300, seconds, 1)), Clock())
        assert model.admit(
            [LoadRun("nvme", 4, 4 << 20), LoadRun(DEVICE, 4, 4 << 20)], CHUNK
        ) in range(9)
        for _ in range(3):
            model.observe_load("nvme", 1 << 20, 0.001)
            model.observe_prefill(2048, 0.1)
        assert model.load_seconds("nvme", 1 << 20) == pytest.approx(0.001, rel=0.5)


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    file = RatesFile(tmp_path, OWNER)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(encode(OWNER, RATES))
    file.path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        file.read()
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(ValueError, match="ordinary"):
        file.read()
    file.write(RATES)
    assert file.read().rates == RATES, "it is put in its place"


def test_a_place_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.INFO)
    model = taught(Clock())
    keeper = RateKeeper(RatesFile(tmp_path / "file" / "rates", OWNER), model, write_every=0.0)
    while "cannot be kept" not in caplog.text:
        os.sched_yield()
    keeper.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.text.count("cannot be kept") == 1


def test_what_is_learned_is_written_meanwhile_and_at_the_end(tmp_path: Path) -> None:
    model, file = taught(Clock()), RatesFile(tmp_path, OWNER)
    keeper = RateKeeper(file, model, write_every=0.0)
    while not file.path.exists():
        os.sched_yield()
    model.observe_load("object", GIB, 2.0)
    keeper.close()
    assert file.read().rates.links.keys() == {"nvme", "object", DEVICE, PAGEABLE}
    again = CostModel(clock=Clock())
    RateKeeper(file, again).close()
    assert again.load_seconds("object", GIB) == pytest.approx(2.0, rel=0.1)


def test_the_oldest_files_go_and_what_killed_writers_left(tmp_path: Path) -> None:
    file = RatesFile(tmp_path, OWNER)
    for number in range(FILES_MAX + 5):
        path = tmp_path / f"{number:032x}.json"
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "making-old").touch()
    os.utime(tmp_path / "making-old", (0, 0))
    (tmp_path / "making-new").touch()
    file.write(RATES)
    file.tidy()
    left = {each.name for each in tmp_path.iterdir()}
    assert len(left) == FILES_MAX + 1
    assert {file.path.name, "making-new"} < left
    assert f"{5:032x}.json" not in left
