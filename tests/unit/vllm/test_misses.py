"""Every miss has its reason: injected ones of all kinds, over real tiers, against what was done."""

from __future__ import annotations

import os
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest
from support.processes.clocks import Clock

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.chain.misses import HashRing, MissLedger, Past, last_loss
from kvtier.cost.model import CostModel
from kvtier.record.record import record_bytes
from kvtier.testing.subject import payload
from kvtier.types import BlockKey, Fate, MissReason, Namespace, Outcome
from kvtier.vllm.identity.prompts import Prompt, chunk_keys
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.miss_socket import LAST, MissAnswer, MissSocket, ask_engines
from kvtier.vllm.misses import KEPT, PIECE, Miss, PromptFacts
from kvtier.vllm.protocol import Report

CHUNK = 16
SIZE = 4096
SLOT = record_bytes(SIZE)
FACTS = {
    "model": "unit",
    "dtype": "float16",
    "hash": "sha256_cbor",
    "block_tokens": str(CHUNK),
    "chunk_blocks": "1",
}
NAMESPACE = Namespace(facts=FACTS, group_bytes=(SIZE,))
OTHER = Namespace(facts=FACTS | {"dtype": "bfloat16"}, group_bytes=(SIZE,))
HYBRID = Namespace(facts=FACTS, group_bytes=(SIZE, SIZE))
FULL, STATE = Shape(CHUNK), Shape(CHUNK, 1, recurrent=True)


class Asked(NamedTuple):
    """A prompt, and what else is in its keys."""

    tokens: list[int]
    salt: str = ""
    adapter: str = ""

    @property
    def facts(self) -> PromptFacts:
        return PromptFacts(len(self.tokens), self.tokens, self.salt, self.adapter)


class Serving:
    """An engine's scheduler side over a stack of its own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *tiers: dict[str, Any],
        costs: CostModel | None = None,
        namespace: Namespace = NAMESPACE,
        shapes: Sequence[Shape] = (FULL,),
        engine: str = "unit",
        slots: int = 65,
        misses: str = "explain",
    ) -> None:
        cpu = {"kind": "cpu", "path": str(folder), "name": name, "capacity": slots * SLOT}
        config = {
            "version": 1,
            "name": "unit",
            "mover": {"mode": "threads"},
            "misses": misses,
            "prefetch": {"waiting": False, "warmup_share": 0.0},
            "rates": {"keep": False},
            "tiers": [cpu | {"eviction": "lru"}, *(tier | {"eviction": "lru"} for tier in tiers)],
        }
        self.stack = Stack.open(config, namespace, serving=True, costs=costs, engine=engine)
        self.chain = self.stack.chain
        self.clock = costs._clock if costs else Clock()
        self.manager = ChainManager(
            self.stack, region="region", ranks=1, costs=costs, clock=self.clock
        )
        self.manager.shapes = dict(enumerate(shapes))
        self.number = 0

    def keys(self, asked: Asked, fingerprint: bytes = b"") -> list[BlockKey]:
        adapter = (asked.adapter, "/adapter") if asked.adapter else None
        prompt = Prompt(asked.tokens, asked.salt, adapter, fingerprint)
        return [key for keys in chunk_keys(prompt, self.stack.namespace) for key in keys]

    def ask(self, asked: Asked, salt: bytes | None = b"", **load: Any) -> Miss:
        """As vLLM: it looks a request up, loads what it finds, and explains the rest."""
        self.number += 1
        name, keys = f"r{self.number}", self.keys(asked)
        groups = len(self.manager.shapes)
        ends = {key: (at // groups + 1) * CHUNK for at, key in enumerate(keys)}
        manager = self.manager
        manager.on_new_request(name, salt)
        manager.begin_lookup(name, 0, len(asked.tokens))
        hits = [key for key in keys if manager.lookup(key, name, ends)]
        stop = 0 if len(hits) % groups else len(hits) // groups * CHUNK
        manager.explain(name, stop, lambda: asked.facts)
        manager.scheduled(name, 0, 0 if stop else len(asked.tokens))
        if hits:
            self.load(hits, name, **load)
        manager.mark_used(name, ends)
        manager.on_request_finished(name)
        manager.on_schedule_end()
        assert manager.misses is not None
        return manager.misses.latest[-1]

    def load(
        self, hits: list[BlockKey], name: str, fails: Outcome = Outcome.OK, given_up: bool = False
    ) -> None:
        """Load what was found; all of it, or none of it, comes."""
        job = self.manager.prepare_load(hits, name)
        if given_up:
            self.clock.now += 1000.0
            self.manager.step_began(0, 0)
            assert self.manager.give_up() == job.number
        failures = {} if fails.ok else dict.fromkeys(range(len(hits)), fails)
        self.manager.report(job.number, Report(1, failures))

    def store(self, *prompts: Asked) -> None:
        keys = [key for each in prompts for key in self.keys(each)]
        self.stack.store({key: payload(key, self.stack.namespace) for key in keys})

    def computed(self, asked: Asked) -> None:
        """A request with this prompt is served, and its blocks are stored."""
        self.ask(asked)
        self.store(asked)

    def held(self, asked: Asked) -> list[list[bool]]:
        """Tier by tier, which blocks of a prompt it has."""
        keys = self.keys(asked)
        return [[at.value == "hit" for at in tier.lookup(keys)] for tier in self.chain.tiers]

    def close(self) -> None:
        self.manager.close()


def nvme(folder: Path, name: str, slots: int = 4096, **more: Any) -> dict[str, Any]:
    path = str(folder / f"nvme-{name}")
    return {"kind": "nvme", "path": path, "capacity": slots * SLOT, "free_floor": 0} | more


def bucket(folder: Path, name: str, blocks: int = 300) -> dict[str, Any]:
    (folder / f"bucket-{name}").mkdir(exist_ok=True)
    url = f"file://{folder}/bucket-{name}"
    return {"kind": "object", "url": url, "capacity": blocks * SLOT}


Injected = Iterator[tuple[MissReason, str, Callable[[], Miss]]]
"""The reason that a miss must be given, what must be told of it, and the request that misses."""


class Injector:
    """Makes misses of all kinds, and knows why each of them happens: it has done it."""

    def __init__(self, folder: Path, seed: int, held: ExitStack) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.held = held

    def serving(self, name: str, *tiers: dict[str, Any], **more: Any) -> Serving:
        made = Serving(self.folder, name, *tiers, **more)
        self.held.callback(made.close)
        return made

    def prompt(self, chunks: int = 1, **more: str) -> Asked:
        tokens = [self.random.randrange(1 << 17) for _ in range(CHUNK * chunks + 1)]
        return Asked(tokens, **more)

    def prompts(self, count: int) -> list[Asked]:
        return [self.prompt() for _ in range(count)]

    # one endless source of misses a kind

    def never_computed(self) -> Injected:
        serving = self.serving("new", nvme(self.folder, "new"))

        def from_there_on(asked: Asked, known: int) -> Miss:
            miss = serving.ask(asked)
            assert (miss.token, miss.missed_tokens) == (known, len(asked.tokens) - 1 - known)
            return miss

        while True:
            chunks = self.random.randint(1, 4)
            asked, known = self.prompt(chunks), CHUNK * self.random.randrange(chunks)
            if known:
                serving.store(Asked(asked.tokens[:known]))
            yield MissReason.NOT_COMPUTED, "", partial(from_there_on, asked, known)

    def evicted(self) -> Injected:
        tiers = nvme(self.folder, "evicted", 128), bucket(self.folder, "evicted")
        serving = self.serving("evicted", *tiers)
        computed: list[Asked] = []
        while True:
            some = self.prompts(24)
            for each in some:
                serving.ask(each)
            serving.store(*some)
            assert serving.stack.settle()
            computed += [each for each in some if all(map(all, serving.held(each)))]
            while computed and not any(map(any, serving.held(computed[0]))):
                asked = computed.pop(0)
                yield MissReason.EVICTED, "evicted from", partial(serving.ask, asked)

    def not_admitted(self) -> Injected:
        serving = self.serving("touch", nvme(self.folder, "touch", admission="second_touch"))
        yield from self._left_alone(serving, "it had not been used twice")

    def over_budget(self) -> Injected:
        serving = self.serving("budget", nvme(self.folder, "budget", writes="192KiB/day"))
        for each in self.prompts(64):  # the first blocks may still be written
            serving.store(each)
        serving.stack.settle(1.0)
        yield from self._left_alone(serving, "not written to nvme")

    def queue_full(self) -> Injected:
        serving = self.serving("queue", nvme(self.folder, "queue", queue_blocks=1))
        while True:
            asked = self.prompts(60)
            self._at_once(serving, asked)
            assert serving.stack.settle()
            serving.store(*self.prompts(64))
            yield from self._gone(serving, asked, "too many blocks waited")

    def evicted_elsewhere(self) -> Injected:
        """By another engine of the machine, whose blocks were hits for this one."""
        ours, theirs = (
            self.serving("machine", engine=engine, slots=400) for engine in ("ours", "theirs")
        )
        memories = [each.chain.tiers[0] for each in (theirs, ours)]
        while not memories[0].has_room:
            for each in memories:
                each.refresh()
        while True:
            asked = self.prompts(32)
            theirs.store(*asked)
            ours.chain.tiers[0].refresh()
            assert [ours.held(each) for each in asked] == [[[True]]] * len(asked)
            while any(map(any, ours.held(asked[-1]))):
                theirs.store(*self.prompts(64))
                ours.chain.tiers[0].refresh()
            ours.chain.poll()
            for each in asked:
                yield MissReason.EVICTED, "in charge of it", partial(ours.ask, each)

    def too_late(self) -> Injected:
        """Evicted in the very step in which it would have been written below."""
        serving = self.serving("on_evict", nvme(self.folder, "on", write="on_evict"))
        while True:
            asked = self.prompts(60)
            self._at_once(serving, asked)
            self._at_once(serving, self.prompts(64))
            assert serving.stack.settle()
            yield from self._gone(serving, asked, "before its turn came")

    def _at_once(self, serving: Serving, prompts: list[Asked]) -> None:
        """Store in one go, as an engine's step does."""
        keys = [key for each in prompts for key in serving.keys(each)]
        taken = serving.chain.prepare_store(keys)
        serving.stack._write(taken, {key: payload(key, NAMESPACE) for key in keys}, set())
        serving.chain.complete_store(taken.keys)

    def _left_alone(self, serving: Serving, told: str) -> Injected:
        """Prompts that were stored in host memory alone, and evicted there."""
        while True:
            asked = self.prompts(32)
            serving.store(*asked)
            serving.stack.settle(0.0)
            serving.store(*self.prompts(64))
            yield from self._gone(serving, asked, told)

    @staticmethod
    def _gone(serving: Serving, prompts: list[Asked], told: str) -> Injected:
        for asked in prompts:
            if not any(map(any, serving.held(asked))):
                yield MissReason.NOT_WRITTEN, told, partial(serving.ask, asked)

    def removed(self) -> Injected:
        serving = self.serving("removed", nvme(self.folder, "removed"))
        while True:
            asked = self.prompt()
            serving.computed(asked)
            serving.chain.forget(serving.keys(asked))
            yield MissReason.REMOVED, "by a command", partial(serving.ask, asked)

    def reset(self) -> Injected:
        serving = self.serving("reset", nvme(self.folder, "reset"))
        while True:
            some = self.prompts(50)
            for each in some:
                serving.ask(each)
            serving.manager.reset()
            for asked in some:
                yield MissReason.RESET, "", partial(serving.ask, asked)

    def failed(self) -> Injected:
        """Loads that fail: of the request itself, and, if a block was bad, of the next one."""
        serving = self.serving("failed", nvme(self.folder, "failed"))
        kinds = {
            Outcome.CORRUPT: MissReason.CORRUPT,
            Outcome.IO_ERROR: MissReason.LOAD_FAILED,
            Outcome.TIMEOUT: MissReason.LOAD_LATE,
        }
        while True:
            outcome = self.random.choice(list(kinds))
            asked = self.prompt()
            serving.store(asked)
            why = kinds[outcome]
            yield why, outcome.value, partial(serving.ask, asked, fails=outcome)
            if outcome is Outcome.CORRUPT:
                serving.stack.settle()
                serving.chain.tiers[1].forget(serving.keys(asked))
                yield why, "its header or checksum", partial(serving.ask, asked)

    def late(self) -> Injected:
        """Loads from a disk that the engine does not wait for any longer."""
        costs = CostModel(clock=Clock())
        serving = self.serving("late", nvme(self.folder, "late"), costs=costs)
        costs.observe_prefill(4096, 0.5)
        while True:
            asked = self.prompt()
            serving.store(asked)
            serving.stack.settle()
            serving.chain.tiers[0].forget(serving.keys(asked))
            late = {"fails": Outcome.CANCELLED, "given_up": True}
            yield MissReason.LOAD_LATE, "", partial(serving.ask, asked, **late)

    def declined(self) -> Injected:
        costs = CostModel(clock=Clock())
        serving = self.serving("slow", nvme(self.folder, "slow"), costs=costs)
        costs.observe_prefill(4096, 0.1)
        for _ in range(4):
            costs.observe_load("nvme", SLOT, 8.0)
        while True:
            asked = self.prompts(32)
            serving.store(*asked)
            serving.stack.settle()
            for each in asked:
                serving.chain.tiers[0].forget(serving.keys(each))
            for each in asked:
                yield MissReason.DECLINED, "computing: ", partial(serving.ask, each)

    def no_room(self) -> Injected:
        serving = self.serving("room", nvme(self.folder, "room"))
        while True:
            asked, others = self.prompts(16), self.prompts(64)
            serving.store(*asked)
            serving.store(*others)
            serving.stack.settle()
            below = [each for each in asked if serving.held(each) == [[False], [True]]]
            for each in others:
                if serving.held(each)[0] == [True]:
                    serving.chain.begin_load(serving.keys(each), "reader", float("inf"))
            for each in below:
                yield MissReason.NO_ROOM, "", partial(serving.ask, each)
            for each in self.prompts(8):
                if not serving.chain.prepare_store(serving.keys(each)).keys:
                    told = "not written to cpu"
                    yield MissReason.NOT_WRITTEN, told, partial(serving.ask, each)
            for ticket in list(serving.chain._ledger._tickets):
                serving.chain.end_load(ticket)

    def unreachable(self) -> Injected:
        serving = self.serving("down", nvme(self.folder, "down"))
        context = serving.chain._context
        while True:
            asked = self.prompts(32)
            serving.store(*asked)
            serving.stack.settle()
            for each in asked:
                serving.chain.tiers[0].forget(serving.keys(each))
            for each in asked:
                while not context.loads.down(1, context.clock()):  # it rests for some time only
                    context.loads.observe(1, [Outcome.TIMEOUT], context.clock())
                yield MissReason.UNREACHABLE, "nvme", partial(serving.ask, each)
            context.loads.observe(1, [Outcome.OK], context.clock())

    def not_stored(self) -> Injected:
        """Another request is computing it, or is just storing it."""
        serving = self.serving("coming", nvme(self.folder, "coming"))
        while True:
            asked = self.prompt()
            serving.ask(asked)
            yield MissReason.NOT_STORED, "computed before", partial(serving.ask, asked)
            reserved = serving.chain.prepare_store(serving.keys(asked))
            yield MissReason.NOT_STORED, "", partial(serving.ask, asked)
            serving.chain.complete_store(
                reserved.keys, dict.fromkeys(reserved.keys, Outcome.CANCELLED)
            )

    def other_words(self) -> Injected:
        """The same prompt with another salt, or another adapter."""
        serving = self.serving("words", nvme(self.folder, "words"))
        while True:
            words = {"salt": "a"}, {"adapter": "one"}, {"salt": "b"}, {"adapter": "two"}
            plain = self.prompt(2)
            serving.computed(plain)
            before: dict[str, str] = {}
            for word in self.random.sample(words, 3):
                asked = Asked(plain.tokens, **word)
                other = before.get("adapter", "") != word.get("adapter", "")
                why = MissReason.OTHER_ADAPTER if other else MissReason.OTHER_SALT
                yield why, "", partial(serving.ask, asked)
                before = word

    def other_namespace(self) -> Injected:
        disk = nvme(self.folder, "shared")
        serving = self.serving("ours", disk)
        theirs = self.serving("theirs", disk, namespace=OTHER)
        while True:
            asked = self.prompts(64)
            theirs.store(*asked)
            theirs.stack.settle()
            serving.manager.other_namespaces.look()
            for each in asked:
                told = "dtype: float16 here, bfloat16 there"
                yield MissReason.OTHER_NAMESPACE, told, partial(serving.ask, each)

    def untrusted(self) -> Injected:
        serving = self.serving("untrusted", nvme(self.folder, "untrusted"))
        while True:
            asked = self.prompt()
            serving.store(asked)
            yield MissReason.UNTRUSTED, "", partial(serving.ask, asked, salt=None)

    def no_state(self) -> Injected:
        """All layers but those with states are kept at a token."""
        serving = self.serving("states", namespace=HYBRID, shapes=(FULL, STATE))
        while True:
            asked = self.prompt()
            full, _ = serving.keys(asked)
            serving.stack.store({full: payload(full, HYBRID)})
            yield MissReason.NO_STATE, "", partial(serving.ask, asked)

    KINDS = (
        *[(never_computed, 24), (evicted, 16), (not_admitted, 7), (over_budget, 6)],
        *[
            (evicted_elsewhere, 3),
            (too_late, 3),
            (queue_full, 5),
            (removed, 5),
            (reset, 5),
            (failed, 6),
            (late, 3),
            (declined, 6),
        ],
        *[(no_room, 2), (unreachable, 3), (not_stored, 3), (other_words, 8)],
        *[(other_namespace, 4), (untrusted, 2), (no_state, 2)],
    )


MISSES = int(os.environ.get("MISSES", "20000"))


@pytest.mark.parametrize("count", [1500, pytest.param(MISSES, marks=pytest.mark.slow)])
def test_injected_misses_are_named_right(tmp_path: Path, count: int) -> None:
    wrong: Counter[tuple[str, str]] = Counter()
    named: Counter[str] = Counter()
    with ExitStack() as held:
        injector = Injector(tmp_path, 1, held)
        kinds, weights = zip(*Injector.KINDS, strict=True)
        sources = [kind(injector) for kind in kinds]
        for source in injector.random.choices(sources, weights, k=count):
            reason, told, ask = next(source)
            miss = ask()
            named[reason.label] += 1
            if miss.reason != reason.label or told not in miss.detail:
                wrong[reason.label, f"{miss.reason} ({miss.detail})"[:60]] += 1
    print(f"{wrong.total()} of {count} wrong; {named.most_common()}")
    assert len(named) == len(MissReason)
    assert wrong.total() <= count // 100, wrong.most_common()


def bytes_of(ring: HashRing) -> int:
    return sum(column.nbytes for column in vars(ring).values() if isinstance(column, np.ndarray))


def test_the_oldest_facts_are_forgotten_first_and_nothing_else() -> None:
    numbers = np.random.default_rng(7)
    ring, rows = HashRing(1 << 10), 1 << 10
    before = bytes_of(ring)
    added: list[tuple[int, int]] = []
    for number in range(300):
        hashes = numbers.integers(0, 1 << 64, numbers.integers(1, 40), np.uint64)
        ring.add(hashes, number, float(number))
        added += [(one, number) for one in hashes.tolist()]
    assert bytes_of(ring) == before
    assert ring.since == pytest.approx(added[-rows][1], abs=1)
    for one, number in added[-rows:]:
        assert list(ring.find(one)) == [(number, float(number))]
    assert not any(list(ring.find(one)) for one, _ in added[:-rows])
    ring.add(np.array([added[-1][0]] * 3, np.uint64), 400, 400.0)
    facts = [fact for fact, _ in ring.find(added[-1][0])]
    assert facts == [400, 400, 400, 299], "the newest first, also of one batch"
    more = np.arange(5 * rows, dtype=np.uint64) << np.uint64(32)  # one bucket
    ring.add(more, 500, 500.0)
    assert [list(ring.find(int(one))) for one in more[-rows:]] == [[(500, 500.0)]] * rows


def test_a_ledger_is_as_large_as_its_tiers_need_and_no_larger() -> None:
    sizes = [bytes_of(MissLedger(blocks)._ring) for blocks in (0, 1 << 13, 1 << 16, 1 << 30)]
    assert sizes == [18 << 14, 18 << 14, 18 << 17, 18 << 19]
    ledger = MissLedger(0)
    ledger.on = False
    ledger.note(0, [BlockKey(b"a")], Fate.REMOVED)
    assert not list(ledger.history(BlockKey(b"a")))


@pytest.mark.parametrize(
    ("history", "fate", "besides"),
    [
        ([], None, None),
        ([("EVICTED", 0)], ("EVICTED", 0), None),
        ([("EVICTED", 1), ("EVICTED", 0)], ("EVICTED", 1), None),
        ([("EVICTED", 0), ("FULL", 1)], ("FULL", 1), ("EVICTED", 0)),
        ([("FULL", 1), ("EVICTED", 0)], ("FULL", 1), ("EVICTED", 0)),
        ([("EVICTED", 0), ("EVICTED", 1), ("FULL", 1)], ("EVICTED", 0), None),
        ([("EVICTED", 1), ("FULL", 1), ("EVICTED", 0)], ("EVICTED", 1), None),
        ([("EVICTED", 0), ("FULL", 1), ("EVICTED", 1)], ("FULL", 1), ("EVICTED", 0)),
        ([("CORRUPT", 0), ("FULL", 1)], ("CORRUPT", 0), None),
        ([("FULL", 0)], ("FULL", 0), None),
    ],
)
def test_of_a_block_s_history_that_counts_without_which_it_would_be_there(
    history: list[tuple[str, int]],
    fate: tuple[str, int] | None,
    besides: tuple[str, int] | None,
) -> None:
    def past(name: str, tier: int, ago: float) -> Past:
        return Past(Fate["FOR_STORE" if name == "EVICTED" else name], tier, ago)

    found = last_loss(past(*each, float(ago)) for ago, each in enumerate(history))
    told = [each and (each.fate, each.tier) for each in found or (None, None)]
    wanted = [each and past(*each, 0.0)[:2] for each in (fate, besides)]
    assert told == wanted


def test_a_long_prompt_is_hashed_in_pieces(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "pieces", slots=400)
    manager = serving.manager
    asked = Asked(list(range(2 * PIECE + 1)))
    longer = Asked([*asked.tokens, *range(CHUNK)])

    def steps() -> int:
        """How many more steps there are until all is explained."""
        count = 0
        while manager.has_pending_work:
            manager.on_schedule_end()
            count += 1
        return count

    serving.ask(asked)
    assert steps() == 1, "one has been"
    miss = serving.ask(asked._replace(salt="other"))
    assert (miss.reason, steps(), miss.reason) == ("not_computed", 1, "other_salt")
    serving.store(asked)
    assert serving.stack.settle()
    miss = serving.ask(longer)
    assert (miss.token, miss.reason, steps()) == (2 * PIECE, "not_computed", 0), "but its head"
    miss = serving.ask(longer._replace(salt="other"))
    assert (miss.token, steps(), miss.reason) == (0, 2, "not_stored")
    manager.step_began(3 * PIECE, 0)
    miss = serving.ask(longer._replace(salt="third"))
    assert (miss.reason, steps()) == ("other_salt", 0), "as fast as prompts are computed"
    serving.close()


def test_what_was_explained_is_answered_by_a_socket_of_this_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    serving = Serving(tmp_path, "socket")
    misses = serving.manager.misses
    assert misses is not None
    asked = [Asked([number] * (CHUNK + 1)) for number in range(KEPT + 5)]
    left = tmp_path / "kvtier" / "1-0.explain"
    left.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    name = f"unit-{uuid4()}"
    answering = MissSocket(name, misses)

    def answers(request: str) -> list[MissAnswer]:
        """Other engines of this user's may answer, too."""
        return [each for each in ask_engines(request) if each.stack == name]

    assert not left.exists(), "of an engine that was killed"
    (path,) = left.parent.iterdir()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.misses for each in answers(LAST)] == [[]]
    for each in asked:
        serving.ask(each)
    assert len(misses.latest) == KEPT
    serving.number = 6
    failing = asked[0]
    serving.store(failing)
    serving.ask(failing, fails=Outcome.IO_ERROR)
    (answer,) = answers("r7")
    assert [each.request for each in answer.misses] == ["r7"] * 2, "asked for, and failed"
    (answer,) = answers(LAST)
    assert [each.reason for each in answer.misses[-2:]] == ["", "load_failed"]
    assert answers("nobody")[0].misses == []
    path.parent.chmod(0o755)
    assert answers(LAST) == [], "others may have put it there"
    path.parent.chmod(0o700)
    answering.close()
    assert answers(LAST) == []
    assert list(left.parent.iterdir()) == []
    serving.close()


def test_each_miss_is_logged_if_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvtier.vllm.misses")
    for misses, lines in (("explain", 0), ("log", 1)):
        caplog.clear()
        serving = Serving(tmp_path, misses, misses=misses)
        serving.ask(Asked([1] * (2 * CHUNK + 3)))
        serving.close()
        said = [each.message for each in caplog.records if each.name == "kvtier.vllm.misses"]
        assert len(said) == lines
        for each in said:
            assert each.startswith("request r1: 0 of 35 tokens found (0 by vLLM itself, 0 in the")
            assert each.endswith("; 32 missed from there on: " + MissReason.NOT_COMPUTED.sentence)
    ignoring = Serving(tmp_path, "ignored", misses="ignore")
    assert ignoring.manager.misses is None
    ignoring.close()


def test_the_guide_has_each_reason() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/misses.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M)
    assert rows == [(each.label, each.sentence) for each in MissReason]
