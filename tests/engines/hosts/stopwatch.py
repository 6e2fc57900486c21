"""The engine of `benchmarks.engine`, in a process of its own: the tests' host with a stop-watch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from host import Host, main

_ENDLESS = 1000
"""More tokens than are decoded while others wait."""


class TimedHost(Host):
    """Commands that answer with seconds."""

    def first_token(self, prompt: list[int], said: dict[str, Any] | None = None) -> dict[str, Any]:
        """Seconds from the request, with what is said of its session, to its first token."""
        engine = self._llm.llm_engine
        self._serial += 1
        begin = time.perf_counter()
        given, name = {"prompt_token_ids": prompt}, f"timed-{self._serial}"
        engine.add_request(name, given, self._greedy(1, said))
        while True:
            outputs = engine.step()
            for output in outputs:
                if output.finished:
                    seconds = time.perf_counter() - begin
                    return {"seconds": seconds, "cached": output.num_cached_tokens or 0}
            if not outputs:
                time.sleep(0.001)  # as vLLM's own process does while all requests wait

    def burst(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """Prompts that come at once: each one's seconds to its first token, and what it found."""
        engine = self._llm.llm_engine
        begin = time.perf_counter()
        names = self._add(prompts, 1)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                seconds = time.perf_counter() - begin
                found[output.request_id] = (seconds, output.num_cached_tokens or 0)
        return [found[name] for name in names]

    def behind(
        self, running: list[list[int]], after: float, prompts: list[list[int]], tokens: int
    ) -> dict[str, Any]:
        """Prompts that come at once while others decode, for so many seconds: each one's seconds to
        its first token, and what it is answered; and the processor's time that the engine's own
        thread took for all."""
        engine = self._llm.llm_engine
        decoding = self._add(running, _ENDLESS)
        begun: set[str] = set()
        while not begun.issuperset(decoding):
            begun |= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
        begin, before = time.perf_counter(), time.thread_time()
        names = self._add(prompts, tokens)
        first: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        while engine.has_unfinished_requests():
            if decoding and time.perf_counter() - begin > after:
                engine.abort_request(decoding)
                decoding = []
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - begin)
                answers[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens or 0
        found = [
            {"seconds": first[name], "tokens": answers[name], "cached": cached[name]}
            for name in names
        ]
        return {"answers": found, "own": time.thread_time() - before}

    def _add(self, prompts: list[list[int]], tokens: int) -> list[str]:
        names = []
        for prompt in prompts:
            self._serial += 1
            names.append(f"timed-{self._serial}")
            given = {"prompt_token_ids": prompt}
            self._llm.llm_engine.add_request(names[-1], given, self._greedy(tokens))
        return names

    def replay(self, requests: list[tuple[float, list[int]]], tokens: int) -> dict[str, Any]:
        """Prompts that come at their times, whatever the engine is at then. Of each the seconds
        from then to its first and to its last token, and what it found; and what all took of the
        processors."""
        engine = self._llm.llm_engine
        before, begin = self._processor_seconds(), time.perf_counter()
        due: dict[str, float] = {}
        first: dict[str, float] = {}
        answers: dict[str, tuple[float, float, int]] = {}
        coming = iter(requests)
        following = next(coming, None)
        while following is not None or engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while following is not None and following[0] <= now:
                self._serial += 1
                name = f"timed-{self._serial}"
                due[name] = following[0]
                given = {"prompt_token_ids": following[1]}
                engine.add_request(name, given, self._greedy(tokens))
                following = next(coming, None)
            if not engine.has_unfinished_requests():
                self._step()  # what is behind the requests goes on
                time.sleep(0.001)
                continue
            for output in engine.step():
                name, now = output.request_id, time.perf_counter() - begin
                first.setdefault(name, now - due[name])
                if output.finished:
                    cached = output.num_cached_tokens or 0
                    answers[name] = (first[name], now - due[name], cached)
        spent = self._processor_seconds() - before
        return {"answers": [answers[name] for name in due], "spent": spent}

    def prefetch(self, on: bool) -> None:
        """Prefetch for requests that wait, or do not, from now on."""
        self._manager.chain.prefetches.on = on

    def wait_and_first_token(self, prompt: list[int]) -> dict[str, Any]:
        """The same, and how many of these seconds had passed when its prompt began to be computed,
        if computing is slowed."""
        begin, self._computing_since = time.perf_counter(), 0.0
        told = self.first_token(prompt)
        return told | {"waited": max(0.0, self._computing_since - begin)}

    def touch_cache(self) -> None:
        """Have all of vLLM's KV cache in memory, as after a while of serving."""
        for cache in self._core.model_executor.driver_worker.model_runner.kv_caches:
            cache.copy_(cache.clone())

    def decode(
        self, prompts: list[list[int]], tokens: int, stored: bool = True
    ) -> dict[str, float]:
        """Seconds for all first tokens, and seconds a step once all requests are decoding. Of both
        also the processor's time: the engine's own thread's, which computes and schedules, and
        that of all threads, the mover's with it. What is not to be `stored` is kept from kvtier."""
        engine = self._llm.llm_engine
        marks = [self._mark()]
        for prompt in prompts:
            self._serial += 1
            parameters = self._greedy(tokens, None if stored else {"max_offload_tokens": 0})
            engine.add_request(f"timed-{self._serial}", {"prompt_token_ids": prompt}, parameters)
        waiting = len(prompts)
        started: set[str] = set()
        while len(started) < waiting:
            started |= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
        marks.append(self._mark())
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        marks.append(self._mark())
        begin, middle, end = marks
        return {
            "prefill": middle[0] - begin[0],
            "prefill_own": middle[1] - begin[1],
            "prefill_all": middle[2] - begin[2],
            "step": (end[0] - middle[0]) / max(1, steps),
            "step_own": (end[1] - middle[1]) / max(1, steps),
            "step_all": (end[2] - middle[2]) / max(1, steps),
        }

    def _mark(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), self._processor_seconds()

    def _processor_seconds(self) -> float:
        """What this process and its children have used of the processors."""
        spent = time.process_time()
        for child in Path("/proc/self/task").glob("*/children"):
            for pid in child.read_text().split():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return spent

    def scheduler_seconds(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """Of every step, the seconds that vLLM's scheduler spends in kvtier: by the clock, and of
        the processor."""
        manager = self._core.scheduler.connector.connector_scheduler.manager
        names = [name for name in dir(type(manager)) if not name.startswith("_")]
        return self._seconds_in(manager, names, prompts, tokens)

    def connector_seconds(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """The same of the connector as a whole, most of which is vLLM's own."""
        return self._seconds_in(self._core.scheduler.connector, _ASKED, prompts, tokens)

    def _seconds_in(
        self, whom: Any, names: Sequence[str], prompts: list[list[int]], tokens: int
    ) -> list[list[float]]:
        spent = [0.0, 0.0]
        for name in names:
            if callable(method := getattr(whom, name)):
                setattr(whom, name, _timed(method, spent))
        engine = self._llm.llm_engine
        for prompt in prompts:
            self._serial += 1
            engine.add_request(
                f"timed-{self._serial}", {"prompt_token_ids": prompt}, self._greedy(tokens)
            )
        found = []
        while engine.has_unfinished_requests():
            spent[:] = [0.0, 0.0]
            engine.step()
            found.append(list(spent))
        for name in names:
            vars(whom).pop(name, None)
        return found


_ASKED = (
    "build_connector_meta",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "has_pending_push_work",
    "on_new_request",
    "request_finished_all_groups",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
)
"""What vLLM's scheduler asks of a connector while it serves; none of these asks another."""


def _timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        own, begin = time.thread_time(), time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            spent[0] += time.perf_counter() - begin
            spent[1] += time.thread_time() - own

    return call


if __name__ == "__main__":
    main(TimedHost)
