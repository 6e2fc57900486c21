"""From the slabs of a real folder straight to two ranks' devices, past everything in between."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.device.device_worlds import keys_of
from support.device.direct_engine import RANKS, Engine
from support.tiers.chains import is_quiet

from kvtier.backends.cpu import Region
from kvtier.cost.model import CostModel
from kvtier.errors import MediumError
from kvtier.move.threads import ThreadMover
from kvtier.settings import Gds
from kvtier.types import BlockKey, Outcome, Presence
from kvtier.vllm.worker import RankShare, RankWorker

KEYS = keys_of(12)
HIT, MISS = Presence.HIT, Presence.MISS


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    engine.store(KEYS)
    engine.forget_memory(KEYS)
    yield engine
    engine.close()


def places(engine: Engine, keys: list[BlockKey]) -> list[int]:
    return engine.chain.locate(keys)


def test_the_first_use_takes_no_slot_and_the_second_does(engine: Engine) -> None:
    engine.hang(True)
    worker_job = engine.begin(KEYS)
    assert sorted(worker_job.files) == list(range(12))
    cpu = engine.cpu.stats()
    assert (cpu.pinned, cpu.in_flight, engine.nvme.stats().pinned) == (0, 0, 12)
    engine.hang(False)
    assert engine.finish(worker_job) == {}
    engine.compare(KEYS)
    assert engine.nvme.stats().pinned == 0
    assert places(engine, KEYS) == [1] * 12
    assert not engine.load(KEYS).files, "used again: worth a slot"
    engine.settle()
    assert places(engine, KEYS) == [0] * 12
    assert engine.chain.chain_stats().hits == [0, 24]


def test_a_block_may_be_asked_for_twice_at_once(engine: Engine) -> None:
    for used in range(2):
        twice = [*KEYS[:2], *KEYS[:2]]
        ticket = engine.chain.begin_load(twice, f"twice-{used}", time.monotonic() + 60)
        assert sorted(ticket.files) == ([] if used else sorted(KEYS[:2]))
        engine.chain.end_load(ticket)
        engine.settle()
    assert (engine.cpu.stats().pinned, engine.nvme.stats().pinned) == (0, 0)


def test_a_load_longer_than_host_memory(tmp_path: Path) -> None:
    engine = Engine(tmp_path, cpu_slots=4)
    keys = keys_of(40)
    for start in range(0, 40, 4):
        engine.store(keys[start : start + 4])
    found = engine.chain.lookup(keys)
    assert found == [HIT] * 40
    worker_job = engine.load(keys)
    assert len(worker_job.files) >= 36
    engine.chain.poll()
    assert engine.chain.lookup(keys) == [HIT] * 40
    assert engine.load(keys).files, "what finds no room for a second use goes direct again"
    engine.close()


def test_a_second_use_that_the_mover_would_refuse_goes_direct_again(engine: Engine) -> None:
    engine.load(KEYS)
    engine.chain.reservations._queues = [4096, 11]
    assert sorted(engine.load(KEYS).files) == list(range(12))
    engine.chain.reservations._queues = [4096, 12]
    assert not engine.load(KEYS).files


def test_what_is_read_directly_needs_no_mover(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.load(KEYS[:4]).files
    monkeypatch.setattr(ThreadMover, "down", True)
    assert places(engine, KEYS) == [1] * 12
    worker_job = engine.load(KEYS)
    assert sorted(worker_job.files) == list(range(12)), "also what is used again"
    engine.compare(KEYS)


def test_all_three_ways_in_one_load(engine: Engine) -> None:
    engine.load(KEYS[:4])
    more = keys_of(4, tag=5)
    engine.store(more)
    worker_job = engine.load([*KEYS[:8], *more])
    assert sorted(worker_job.files) == [4, 5, 6, 7], "used once, never, and in memory"


def test_the_cost_model_learns_each_way_for_itself(tmp_path: Path) -> None:
    costs = CostModel()
    engine = Engine(tmp_path, costs=costs)
    engine.store(KEYS)
    engine.forget_memory(KEYS)
    assert len(engine.load(KEYS).files) == 12
    direct, prior = costs.stats()["nvme direct"], costs.stats()["device"].bandwidth
    assert direct.samples > 0
    assert "nvme" not in costs.stats()
    assert costs.stats()["device"].bandwidth == prior
    assert not engine.load(KEYS).files
    engine.settle()
    assert costs.stats()["nvme"].samples > 0
    assert costs.stats()["nvme direct"].samples == direct.samples
    engine.close()


@pytest.mark.parametrize("able", [(False, True), (False, False)])
def test_unless_every_rank_can_nobody_does(tmp_path: Path, able: tuple[bool, bool]) -> None:
    engine = Engine(tmp_path, able=able)
    engine.store(KEYS)
    engine.forget_memory(KEYS)
    assert not engine.load(KEYS).files
    engine.close()


def test_nothing_is_read_directly_before_the_ranks_have_said_so(engine: Engine) -> None:
    engine.chain.read_directly(False)
    worker_job = engine.load(KEYS[:2])
    assert not worker_job.files
    assert engine.load(KEYS[4:6]).files, "now they have"


def flip(worker_job_file: tuple[str, int], at: int) -> None:
    path, start = worker_job_file
    with open(path, "r+b") as file:
        file.seek(start + at)
        byte = file.read(1)
        file.seek(start + at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_is_quarantined_and_the_request_recomputed(engine: Engine) -> None:
    engine.hang(True)
    probe = engine.begin(KEYS[:3])
    engine.hang(False)
    assert engine.finish(probe) == {}
    flip(probe.files[1], 5000)
    engine.chain.read_directly(True)
    engine.chain._loads._read_directly.clear()
    worker_job = engine.begin(KEYS[:3])
    failures = engine.finish(worker_job)
    assert failures[1] is Outcome.CORRUPT
    assert engine.failed == ["r"]
    engine.chain.poll()
    assert engine.chain.lookup([KEYS[1]]) == [MISS]
    assert engine.nvme.stats().corrupt == 1
    assert engine.nvme.stats().pinned == 0
    assert engine.chain.chain_stats().failures[1]["corrupt"] == 1


def test_a_driver_that_fails_is_no_fault_of_the_block(engine: Engine) -> None:
    engine.ranks[1].driver.fails = OSError(5, "Input/output error")
    assert engine.finish(engine.begin(KEYS[:1])) == {0: Outcome.IO_ERROR}
    assert engine.failed == ["r"]
    assert engine.nvme.lookup(KEYS[:1]) == [HIT], "it is still there, and rests"
    assert engine.chain.lookup(KEYS[:1]) == [MISS]
    assert engine.nvme.stats().pinned == 0


def test_a_read_that_hangs_ends_at_its_deadline(engine: Engine) -> None:
    engine.manager._load_seconds = 0.05
    engine.ranks[0].driver.hangs = True
    failures = engine.finish(engine.begin(KEYS[:2]))
    assert failures[0] is Outcome.TIMEOUT
    assert engine.nvme.stats().pinned == 0
    assert engine.nvme.lookup(KEYS[:2]) == [HIT, HIT]


def test_slots_being_read_are_not_given_to_others(tmp_path: Path) -> None:
    engine = Engine(tmp_path, nvme_slots=16)
    engine.store(KEYS)
    engine.forget_memory(KEYS)
    engine.hang(True)
    worker_job = engine.begin(KEYS)
    for tag in range(1, 6):
        more = keys_of(12, tag=tag)
        engine.store_alone(more)
    assert engine.nvme.stats().pinned == 12
    engine.hang(False)
    assert engine.finish(worker_job) == {}
    engine.compare(KEYS)
    engine.close()


def test_a_reset_while_reads_are_under_way(engine: Engine) -> None:
    engine.hang(True)
    worker_job = engine.begin(KEYS)
    engine.manager.reset()
    assert engine.chain.lookup(KEYS) == [MISS] * 12
    engine.hang(False)
    engine.finish(worker_job)
    assert engine.nvme.stats().pinned == 0
    assert is_quiet(engine.chain._ledger)
    assert not engine.manager.has_pending_work


def test_a_neighbours_slot_used_again_meanwhile_is_gone(engine: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path, name="two")
    other.contents = engine.contents
    other.nvme.refresh()
    other.store(keys_of(1, tag=9))
    assert other.load(KEYS[:4]).files, "another engine's blocks, straight from its slabs"
    worker_job = other.manager.prepare_load(KEYS[4:5], "r")
    path, at = worker_job.files[0]
    with open(path, "r+b") as file:
        file.seek(worker_job.files[0].at)
        record = bytearray(file.read(8192))
        record[5000] ^= 1
        file.seek(at)
        file.write(record)
    other.begin_with(worker_job)
    assert set(other.finish(worker_job).values()) == {Outcome.CORRUPT}
    assert other.nvme.lookup(KEYS[4:5]) == [Presence.MISS]
    assert other.nvme.stats().corrupt == 0, "its owner may have it right"
    other.close()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_whatever_happens_the_bytes_are_right(tmp_path: Path, seed: int) -> None:
    """Random loads by all ways, with memory lost, evictions, and direct reads coming and going."""
    rng = random.Random(seed)
    engine = Engine(tmp_path, cpu_slots=24, nvme_slots=48)
    known: list[BlockKey] = []
    direct = 0
    for turn in range(40):
        if rng.random() < 0.4:
            keys = keys_of(rng.randrange(1, 12), tag=turn)
            engine.store(keys)
            known += keys
        if rng.random() < 0.4:
            engine.forget_memory(known)
        if rng.random() < 0.2:
            engine.chain.read_directly(rng.random() < 0.5)
        wanted = rng.sample(known, min(len(known), rng.randrange(1, 30)))
        found = engine.chain.lookup(wanted)
        hits = [key for key, at in zip(wanted, found, strict=True) if at is HIT]
        if hits:
            direct += len(engine.load(hits).files)
        engine.chain.poll()
    assert direct > 20
    engine.settle()
    assert is_quiet(engine.chain._ledger)
    assert sum(rank.driver.reads for rank in engine.ranks) == RANKS * direct
    engine.close()


def test_what_is_required_of_a_rank_without_a_gpu_keeps_it_from_starting(tmp_path: Path) -> None:
    device = SimpleNamespace(type="cpu", index=None)
    caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=SimpleNamespace(device=device))])
    share = RankShare(rank=0, ranks=1, blocks_per_chunk=1, group_ids=(0,))
    with pytest.raises(
        MediumError, match=r"required for .*, but the KV tensors are on a cpu device: mend"
    ):
        RankWorker(caches, share, gds=Gds.REQUIRE, folders=[tmp_path], attach=Region.attach)
    RankWorker(caches, share, gds=Gds.AUTO, folders=[tmp_path], attach=Region.attach)
