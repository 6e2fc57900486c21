"""What is measured of each contestant, beside an engine without a connector, in turns with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_engine import contestants
from benchmarks.gpu_engine.contestants import KVTIER, TIERING, WITHOUT, Places, Scale
from benchmarks.gpu_engine.engines import Engine, EngineFailed
from benchmarks.gpu_engine.results import Deadline, Results, Row

Prompt = tuple[int, int]
"""A seed, and a length."""
Tokens = dict[Prompt, list[int]]


def equal(known: Tokens, asked: Sequence[Prompt], answers: Sequence[dict[str, Any]]) -> str:
    """How many answers begin as the first answer to their prompt did."""
    same = 0
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = answer["tokens"]
        before = known.setdefault(prompt, tokens)
        least = min(len(before), len(tokens))
        same += before[:least] == tokens[:least]
    return f"{same} of {len(answers)} equal"


class Competition:
    """Engines of one model, one contestant after the other."""

    def __init__(
        self, scale: Scale, model: Path, places: Places, results: Results, *, short: bool
    ) -> None:
        self._scale = scale
        self._model = model
        self._places = places
        self._results = results
        self._quick = short
        self._known: Tokens = {}
        self._seed = 1000
        self._plain: Engine | None = None

    # -- engines ---------------------------------------------------------------------------

    def _start(self, contestant: str, **more: Any) -> Engine:
        config = contestants.transfer_config(contestant, self._scale, self._places, **more)
        arguments = self._scale.engine | {
            "model": str(self._model),
            "kv_cache_memory_bytes": self._scale.device_bytes,
            "max_num_batched_tokens": self._scale.step_tokens,
            "kv_transfer_config": config,
        }
        name = contestant.replace(" ", "-")
        log = self._places.folder / f"{name}.log"
        scale = self._scale
        return Engine(contestant, log, arguments, scale.vocabulary, scale.environment)

    @contextlib.contextmanager
    def _started(
        self, stage: str, contestant: str, deadline: Deadline, what: str = "", **more: Any
    ) -> Iterator[Engine]:
        with self._start(contestant, **more) as engine:
            told = engine.ready(deadline.left(self._scale.start_s))
            if what:
                row = Row(stage=stage, engine=contestant, what=what, unit="s", more=told)
                row.values = [told["ready"]]
                self._results.add(row)
            yield engine

    def _prompts(self, count: int, length: int) -> list[Prompt]:
        """That nobody was asked yet."""
        self._seed += count
        return [(self._seed - number, length) for number in range(count)]

    # -- measurements ----------------------------------------------------------------------

    def _ask(
        self,
        stage: str,
        engine: Engine,
        deadline: Deadline,
        what: str,
        prompts: Sequence[Prompt],
        tokens: int = 8,
    ) -> None:
        """First tokens of prompts, one after the other."""
        asked = engine.ask(deadline.left(), "generate", prompts=prompts, tokens=tokens)
        answers = asked["answers"]
        self._results.add(
            Row(
                stage=stage,
                engine=engine.name,
                what=what,
                values=[answer["times"][0] * 1e3 for answer in answers],
                unit="ms to the first token",
                cached=[answer["cached"] for answer in answers],
                equal=equal(self._known, prompts, answers),
            )
        )

    def _sizes(self) -> list[tuple[str, int, int]]:
        """What prompts are called, how many there are, how long each is."""
        return [("8k", 2, self._scale.short), ("32k", 1, self._scale.long)]

    def _cold(self, stage: str, engine: Engine, deadline: Deadline, when: str) -> list[Prompt]:
        """New prompts, of which each engine gets its own, in turns."""
        made: list[Prompt] = []
        for name, count, length in self._sizes():
            prompts = self._prompts(count, length)
            self._ask(stage, engine, deadline, f"{name} cold, {when}", prompts)
            if self._plain is not engine:
                beside = f"{name} cold, beside {engine.name}, {when}"
                self._in_turn(self._ask, stage, deadline, beside, prompts)
            made += prompts
        return made

    def _again(
        self, stage: str, engine: Engine, deadline: Deadline, where: str, prompts: Sequence[Prompt]
    ) -> None:
        for name, _, length in self._sizes():
            asked = [prompt for prompt in prompts if prompt[1] == length]
            self._ask(stage, engine, deadline, f"{name} from {where}", asked)

    def _decode(self, stage: str, engine: Engine, deadline: Deadline, what: str) -> None:
        """The times between tokens while so many requests decode, and nothing else is computed."""
        scale = self._scale
        asked = engine.ask(
            deadline.left(),
            "generate",
            prompts=self._prompts(scale.decoding, scale.decode_prompt),
            tokens=scale.decode_tokens,
            together=True,
        )
        times = [answer["times"] for answer in asked["answers"]]
        begun = max(each[0] for each in times)
        gaps = [
            (after - before) * 1e3
            for each in times
            for before, after in pairwise(each)
            if before >= begun
        ]
        row = partial(Row, stage=stage, engine=engine.name, unit="ms")
        if gaps:
            self._results.add(row(what=what, values=[median(gaps)]))
            self._results.add(row(what=f"{what}, longest", values=[max(gaps)]))

    def _chat(self, stage: str, engine: Engine, deadline: Deadline, what: str) -> None:
        """Conversations that outgrow the device: all users send their next turn at once."""
        scale, first = self._scale, self._prompts(self._scale.users, 0)
        seconds, waited, cached, tokens = 0.0, [], 0, 0
        for turn in range(scale.turns):
            length = scale.first_turn + turn * scale.each_turn
            asked = engine.ask(
                deadline.left(),
                "generate",
                prompts=[(seed, length) for seed, _ in first],
                tokens=16,
                together=True,
            )
            seconds += asked["seconds"]
            waited += [answer["times"][0] for answer in asked["answers"]]
            cached += sum(answer["cached"] for answer in asked["answers"])
            tokens += length * len(first)
        row = partial(Row, stage=stage, engine=engine.name)
        mean = sum(waited) / len(waited)
        for value, unit in (
            (tokens / seconds, "prompt tokens a second"),
            (mean, "s to the first token"),
            (100 * cached / tokens, "% of tokens cached"),
        ):
            self._results.add(row(what=what, values=[value], unit=unit))

    def _rest(self, engine: Engine, deadline: Deadline, seconds: float) -> None:
        """Let what is stored settle, in steps of an engine that is almost idle."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            engine.ask(deadline.left(), "generate", prompts=[(1, 40)], tokens=4)
            time.sleep(min(0.5, seconds / 4))

    # -- stages ----------------------------------------------------------------------------

    def without(self, deadline: Deadline) -> None:
        """The engine without a connector, which stays for the others to be compared with."""
        told = self._start_plain(deadline)
        engine = self._plain
        assert engine is not None
        row = Row(stage=WITHOUT, engine=WITHOUT, what="start until ready", unit="s", more=told)
        row.values = [told["ready"]]
        self._results.add(row)
        prompts = self._cold(WITHOUT, engine, deadline, "right after")
        self._again(WITHOUT, engine, deadline, "the engine's own cache", prompts)
        self._chat(WITHOUT, engine, deadline, "conversations, right after")
        self._decode(WITHOUT, engine, deadline, "a decode step")

    def _start_plain(self, deadline: Deadline) -> dict[str, Any]:
        engine = self._start(WITHOUT)
        try:
            told = engine.ready(deadline.left(self._scale.start_s))
        except BaseException:
            engine.kill()
            raise
        self._plain = engine
        return told

    def _in_turn(self, measure: Callable[..., None], stage: str, *arguments: Any) -> None:
        """The same of the engine without a connector, if it is there: its failure is not that of
        whom it is compared with."""
        if self._plain is None:
            return
        try:
            measure(stage, self._plain, *arguments)
        except EngineFailed as error:
            self._results.add(Row(stage=stage, engine=WITHOUT, what="beside", failed=str(error)))
            self.close()

    def contestant(self, name: str, deadline: Deadline) -> None:
        """One that has a cache: its start, prompts from everywhere, conversations, its end."""
        self._places.clear()
        if self._plain is None:  # it was measured in an earlier run
            with contextlib.suppress(EngineFailed):
                self._start_plain(deadline)
        settle = self._scale.settle_s / (2 if self._quick else 1)
        with self._started(name, name, deadline, "start until ready") as engine:
            self._cold(name, engine, deadline, "right after")
            self._decode(name, engine, deadline, "a decode step, right after")
            self._chat(name, engine, deadline, "conversations, right after")
            self._rest(engine, deadline, settle)
            if not self._quick:
                self._chat(name, engine, deadline, "conversations, settled")
            prompts = self._cold(name, engine, deadline, "settled")
            self._again(name, engine, deadline, "the engine's own cache", prompts)
            self._rest(engine, deadline, settle / 3)
            for _ in range(2):
                engine.ask(deadline.left(), "forget")
            self._again(name, engine, deadline, "CPU memory", prompts)
            self._in_turns(name, engine, deadline)
            counted = engine.ask(deadline.left(), "counters")["counters"]
            self._results.add(Row(stage=name, engine=name, what="counters", more=counted))
            if name == KVTIER:
                engine.kill()
            else:
                self._stop(name, engine, deadline, "shutdown")
        if name == KVTIER:
            self._after_kill(prompts, deadline)
        if name in (KVTIER, TIERING):
            self._from_disk(name, prompts, deadline)

    def _in_turns(self, stage: str, engine: Engine, deadline: Deadline) -> None:
        """Decoding, in turns with the engine without a connector."""
        for turn in range(1 if self._quick else 3):
            self._decode(stage, engine, deadline, f"a decode step, turn {turn + 1}")
            beside = f"a decode step, beside {stage}, turn {turn + 1}"
            self._in_turn(self._decode, stage, deadline, beside)

    def _stop(self, stage: str, engine: Engine, deadline: Deadline, what: str) -> None:
        seconds = engine.stop(deadline.left(60.0))
        row = partial(Row, stage=stage, engine=engine.name)
        self._results.add(row(what=what, values=[seconds], unit="s"))
        left = self._places.left_in_memory() / 2**30
        self._results.add(
            row(what=f"left in shared memory after {what}", values=[left], unit="GiB")
        )

    def _after_kill(self, prompts: Sequence[Prompt], deadline: Deadline) -> None:
        more = {"load_policy": "always"} if self._quick else {}  # so short a prompt says nothing
        with self._started(KVTIER, KVTIER, deadline, "start after kill -9", **more) as engine:
            self._again(KVTIER, engine, deadline, "memory kept over kill -9", prompts)
            engine.ask(deadline.left(), "forget")
            self._again(KVTIER, engine, deadline, "memory kept over kill -9, again", prompts)
            self._stop(KVTIER, engine, deadline, "shutdown")

    def _from_disk(self, name: str, prompts: Sequence[Prompt], deadline: Deadline) -> None:
        """All of it, even where computing is faster; then, as it is by default, what is faster."""
        self._places.forget_memory()
        both = ("always",) if self._quick else ("always", "cost_model")
        for loads in both if name == KVTIER else ("",):
            more = {"load_policy": loads} if loads else {}
            with self._started(name, name, deadline, **more) as engine:
                where = "disk after a restart" + (f", load_policy: {loads}" if loads else "")
                self._again(name, engine, deadline, where, prompts)
                self._stop(name, engine, deadline, f"shutdown, {where}")
            self._places.forget_memory()

    def close(self) -> None:
        """End the engine that stayed."""
        if self._plain is not None:
            self._plain.kill()
            self._plain = None
