"""The file in which engines share a folder's write budget, and the leases that they take of it."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.clocks import Clock

from kvtier.backends.nvme.write_budget import Entry, Leases, WriteLedger, pack, read_entry, unpack
from kvtier.chain.admission import SPREAD_S
from kvtier.interfaces.write_budget import WriteAllowance

MIB = 1 << 20
RATE = 2 * (1 << 40) / 86400
BURST = 3600 * RATE
BLOCK = 8 * MIB
DAY_S = 86400


class Engine:
    """An engine's lease, with clocks of the test's."""

    def __init__(self, root: Path, clock: Clock, rate: float = RATE) -> None:
        self.allowance = WriteAllowance(rate, 3600 * rate, BLOCK)
        self.leases = Leases(WriteLedger(root, rate, 3600 * rate, clock), self.allowance, clock)
        self.leases.renew(at_once=True)

    def write(self, blocks: int) -> int:
        taken = self.allowance.blocks(blocks)
        self.allowance.spend(taken * BLOCK)
        return taken * BLOCK


def test_a_new_budget_is_the_users_own_file_and_not_full(tmp_path: Path) -> None:
    Engine(tmp_path, Clock())
    file = tmp_path / "writes"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    entry = read_entry(file)
    assert entry is not None
    assert entry.level < SPREAD_S * RATE


@pytest.mark.slow
def test_a_simulated_week_of_three_engines_with_restarts_keeps_the_rate(tmp_path: Path) -> None:
    dice, clock = random.Random(43), Clock(1e9)
    engines = [Engine(tmp_path, clock) for _ in range(3)]
    written, start, step = 0.0, clock.now, 30.0
    demand = [1.0] * 3
    while clock.now < start + 7 * DAY_S:
        clock.now += step
        for at, engine in enumerate(engines):
            if dice.random() < 0.02:  # an engine's load changes; together they want too much
                demand[at] = dice.choice((0.0, 0.5, 4.0))
            engine.leases.renew()
            written += engine.write(int(demand[at] * step * RATE / BLOCK))
            if dice.random() < step / (3 * 3600):
                if dice.random() < 0.5:
                    engine.leases.close()  # else it was killed
                engines[at] = Engine(tmp_path, clock)
    most = RATE * 7 * DAY_S
    assert 0.98 * most <= written <= 1.02 * most
    for engine in engines:
        engine.leases.close()
    entry = read_entry(tmp_path / "writes")
    assert entry is not None
    assert 0.98 * written <= entry.written <= written  # who is killed has not told all


def test_an_hours_worth_may_come_at_once_and_no_more(tmp_path: Path) -> None:
    clock = Clock(1e9)
    engines = [Engine(tmp_path, clock) for _ in range(3)]
    clock.now += 10 * DAY_S
    written = 0.0
    for _ in range(600):
        clock.now += 0.1
        for engine in engines:
            engine.leases.renew()
            written += engine.write(10_000)
    assert 0.95 * BURST < written < 1.05 * BURST + 60 * RATE


def test_what_an_idle_engine_held_comes_back(tmp_path: Path) -> None:
    clock = Clock(1e9)
    busy = Engine(tmp_path, clock)
    clock.now += DAY_S
    for _ in range(20):
        clock.now += 1
        busy.leases.renew()
        busy.write(100)
    held = busy.allowance.lease
    for _ in range(10):
        clock.now += 1
        busy.leases.renew()
    assert busy.allowance.lease < 32 * BLOCK < held or held < 32 * BLOCK
    busy.leases.close()
    assert busy.allowance.lease == 0


def test_what_was_written_without_asking_is_made_up_for(tmp_path: Path) -> None:
    clock = Clock(1e9)
    engine = Engine(tmp_path, clock)
    engine.allowance.spend(2 * SPREAD_S * RATE)  # a command that fills the folder
    clock.now += 1
    engine.leases.renew()
    assert engine.write(1) == 0
    clock.now += SPREAD_S / 2
    engine.leases.renew()
    assert engine.write(1) == 0
    clock.now += SPREAD_S
    engine.leases.renew()
    engine.write(1)
    clock.now += 1
    engine.leases.renew()
    assert engine.write(1) == BLOCK


@pytest.mark.parametrize(
    "damage", [b"x", b"\0" * 64, bytes(range(64)), b"kvtwear1" + b"\xff" * 56, b"y" * 100_000]
)
def test_damage_costs_the_budget_and_never_more(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "writes").write_bytes(damage)
    clock = Clock(1e9)
    engine = Engine(tmp_path, clock)
    assert engine.write(1) == 0
    clock.now += 60
    engine.leases.renew()
    engine.allowance.blocks(1)
    clock.now += 60
    engine.leases.renew()
    assert engine.write(1) == BLOCK


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "writes").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        WriteLedger(root, RATE, BURST).exchange(0, BLOCK)
    assert victim.read_bytes() == b"precious"


def test_a_pipe_does_not_hang_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "writes")
    assert read_entry(tmp_path / "writes") is None
    with pytest.raises(OSError, match="no file"):
        WriteLedger(tmp_path, RATE, BURST).exchange(0, BLOCK)


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_budget_that_were_not_packed(text: bytes) -> None:
    assert unpack(text) is None


@given(st.binary(min_size=1, max_size=1), st.integers(0, 63))
def test_one_byte_changed_is_noticed(byte: bytes, at: int) -> None:
    text = pack(Entry(RATE, BURST, 5.0, 1e9, 7.0, 1e9))
    changed = text[:at] + byte + text[at + 1 :]
    assert unpack(changed) == (unpack(text) if changed == text else None)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e30])
def test_numbers_that_are_none_are_refused(wrong: float) -> None:
    assert unpack(pack(Entry(RATE, BURST, wrong, 1e9, 0.0, 1e9))) is None
