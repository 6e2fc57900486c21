"""The mooncake tier keeps the contract of every tier, and says what the memory model says: on a
real master, with real clients."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.processes.cli_world import run
from support.processes.mooncake_pool import SEGMENT, MooncakePool
from support.processes.mooncake_server import NAMESPACE, MooncakeServer
from support.tiers.subjects import capacity

from kvtier.backends.mooncake import BACKEND, MooncakeSettings, MooncakeTier
from kvtier.backends.mooncake.tier import CONFIRMED_S
from kvtier.eviction import create_policy
from kvtier.interfaces.backend import TierContext
from kvtier.settings import TierSettings
from kvtier.system.disk import Disk
from kvtier.testing.contract import TierContract
from kvtier.testing.stateful import (
    BLOCKS,
    SETTINGS,
    UNIVERSE,
    TierMachine,
    load_failures,
    some_keys,
)
from kvtier.testing.subject import Rig, Subject, failures, make_keys
from kvtier.types import BlockKey, Outcome


class MooncakeSubject(Subject):
    """The pool has more room than a tier keeps in mind, and remembers more than that: each folder
    has names of its own there."""

    backend = BACKEND

    def __init__(self, master: str) -> None:
        self._master = master
        self.now = 1e9

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> MooncakeSettings:
        size, prefix = capacity(blocks * record_bytes), hashlib.sha256(str(folder).encode())
        return MooncakeSettings(master=self._master, capacity=size, prefix=prefix.hexdigest()[:16])


class TimedSubject(MooncakeSubject):
    """Whose tiers have the time of the machine: what the pool is asked depends on it."""

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> MooncakeTier:
        size, policy = settings.capacity.resolve(0), create_policy("lru")
        return MooncakeTier(context.namespace, size, policy, lambda: self.now)


class TestMooncake(TierContract):
    @pytest.fixture(autouse=True)
    def subject_in(self, pool: MooncakePool) -> None:
        type(self).subject = MooncakeSubject(pool.address)


class MooncakeMachine(TierMachine):
    """What the pool loses, what a tier learns of it, and what it forgets when it is opened anew."""

    subject: TimedSubject

    @initialize()
    def begin(self) -> None:
        self.written: set[BlockKey] = set()
        """What the pool has, of whomever."""
        super().begin()
        self.peer = self.rig.peer()

    def ask(self, rig: Rig, keys: list[BlockKey]) -> None:
        """As when a request comes."""
        asked, spec = rig.tier.prepare_find(keys)
        if spec is not None:
            rig.tier.complete_find(asked, rig.handler.find(spec, asked))

    @rule(keys=some_keys)
    def a_request_comes(self, keys: list[BlockKey]) -> None:
        evictable, before = set(self.model.victims(BLOCKS)), set(self.model_hits())
        self.ask(self.rig, keys)
        after = set(self.rig.resident(UNIVERSE))
        gone, new = before - after, sorted(after - before)
        assert gone - evictable <= set(keys) - self.written
        self.model.forget(sorted(gone))
        assert set(new) <= self.written & set(keys)
        assert self.model.prepare_store(new, evict=False).keys == new
        self.model.complete_store(new)

    @rule(picks=st.lists(st.sampled_from(UNIVERSE), max_size=2))
    def the_pool_loses(self, picks: list[BlockKey]) -> None:
        store = self.rig.handler._pool.open()
        for key in picks:
            store.remove(self.rig.handler._name(key), True)
        self.written.difference_update(picks)

    @rule(seconds=st.sampled_from([1.0, CONFIRMED_S]))
    def time_passes(self, seconds: float) -> None:
        self.subject.now += seconds

    @precondition(lambda self: self.storing)
    @rule(which=st.integers(0, 7), bad=st.sets(st.integers(0, BLOCKS - 1), max_size=2))
    def commit(self, which: int, bad: set[int]) -> None:
        if self.storing:
            self.written.update(self.storing[which % len(self.storing)].keys)
        super().commit(which, bad)

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 7), outcome=load_failures)
    def finish_load(self, which: int, outcome: Outcome | None) -> None:
        """What the pool has lost fails, and is offered no more."""
        keys, spec = self.loading.pop(which % len(self.loading))
        failed = dict(failures(keys[:1], outcome) if outcome else {})
        for key, now in self.rig.read(keys, spec).items():
            assert now is (Outcome.OK if key in self.written else Outcome.GONE)
            if not now.ok:
                failed.setdefault(key, now)
        self.tier.complete_load(keys, failed)
        self.model.complete_load(keys, failed)
        self.dropped |= set(failed)

    @rule(dice=st.integers(0, 3))
    def restart(self, dice: int) -> None:
        """Nothing is known but by asking; what the pool has is not lost with the client."""
        if dice != 3:  # seldom, because it takes a second
            return
        while self.loading:
            self.finish_load(-1, None)
        for reservation in self.storing:
            aborted = failures(reservation.keys, Outcome.CANCELLED)
            self.model.complete_store(reservation.keys, aborted)
        self.storing.clear()
        self.rig.reopen()
        self.tier = self.rig.tier
        self.model.clear()
        self.visible = set()
        self.a_request_comes(UNIVERSE[:BLOCKS])
        assert set(self.model_hits()) == self.written & set(UNIVERSE[:BLOCKS])

    @rule()
    def another_engine_asks(self) -> None:
        """One that has just been started."""
        self.peer.tier = self.subject.open_tier(self.peer.settings, self.peer.context, Disk())
        self.ask(self.peer, UNIVERSE)
        found = self.peer.get(UNIVERSE)
        assert len(found) == min(BLOCKS, len(self.written))
        assert set(found) <= self.written

    def teardown(self) -> None:
        self.peer.close()
        super().teardown()


class TestMooncakeBesideTheModel(MooncakeMachine.TestCase):  # type: ignore[misc]
    # Few and long ones: Mooncake takes a second to close a client.
    settings = settings(SETTINGS, max_examples=6, stateful_step_count=100)

    @pytest.fixture(autouse=True)
    def subject_in(self, pool: MooncakePool) -> None:
        MooncakeMachine.subject = TimedSubject(pool.address)


def test_commands_see_what_the_pool_holds(pool: MooncakePool, tmp_path: Path) -> None:
    """By its master; what a command removes, no engine finds."""
    keys = make_keys(12)
    tier = {"kind": "mooncake", "master": pool.address, "prefix": "seen", "capacity": "1GiB"}
    stack, blind = tmp_path / "stack.yaml", tmp_path / "blind.yaml"
    cpu = {"kind": "cpu", "path": str(tmp_path), "capacity": "16MiB"}
    for file, more in ((stack, {"metrics": pool.metrics}), (blind, {})):
        tiers = [cpu, tier | more]
        file.write_text(json.dumps({"version": 1, "name": "seen", "tiers": tiers}))
    server = MooncakeServer("seen", pool.address, "seen")
    server.store(keys)
    listed = run("ls", "-c", stack)["namespaces"]
    assert [(each["kind"], each["namespace"], each["blocks"]) for each in listed] == [
        ("mooncake", NAMESPACE.id, 12)
    ]
    shown = run("ls", NAMESPACE.id, "-c", stack)["blocks"]
    assert sorted(each["key"] for each in shown) == sorted(key.hex() for key in keys)
    _, there = run("du", "-c", stack)
    assert there["blocks"] == 12
    assert there["used"] <= there["allocated"] < there["capacity"] == SEGMENT
    assert run("verify", "-c", stack, "--tier", "mooncake")["counts"]["good"] == 12
    (report,) = run("copy", stack, (tmp_path / "copy").as_uri(), "--tier", "mooncake")["namespaces"]
    assert report["copied"] == 12
    (trouble,) = run("du", "-c", blind, "--tier", "mooncake", code=1)[0]["troubles"]
    assert "set metrics to where its --metrics_port is" in trouble
    run("clear", "-c", stack, "--tier", "mooncake", "--yes")
    assert server.load(keys) == []
    assert run("du", "-c", stack)[1]["blocks"] == 0
    server.close()
