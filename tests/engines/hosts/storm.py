"""Many requests at once on a real engine: shared prefixes, aborts, forgotten caches, a siege."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

HANGS_S = 300.0


def storm(
    engine: Any,
    greedy: Callable[[int], Any],
    step: Callable[[], None],
    prompts: list[list[int]],
    tokens: int,
    seed: int,
    running: int = 12,
    abort: float = 0.0,
    forget: float = 0.0,
    reset_at: int = -1,
    preempt_at: int = -1,
    priorities: bool = False,
) -> dict[str, Any]:
    """Send the prompts at random moments; answers with the outputs of those not aborted.

    `abort` and `forget` are chances a step: of aborting some request, and of emptying vLLM's
    own prefix cache (which it refuses while blocks are in use). With `reset_at` prompts left, the
    tiers are emptied, too, whatever is under way; with `preempt_at` left, all that runs is
    preempted as soon as vLLM does that, which is not while something is being loaded.
    """
    rng = random.Random(seed)
    scheduler = engine.engine_core.engine_core.scheduler
    counts = _count_preemptions(scheduler)
    todo = list(range(len(prompts)))
    live: set[int] = set()
    outputs: dict[int, list[int]] = {}
    aborted: list[int] = []
    cached = steps = 0
    preempting = False
    moved = time.monotonic()
    while todo or live:
        while todo and len(live) < running and rng.random() < 0.5:
            at = todo.pop(0)
            priority = at % 3 if priorities else 0
            given = {"prompt_token_ids": prompts[at]}
            engine.add_request(str(at), given, greedy(tokens), priority=priority)
            live.add(at)
            if len(todo) == reset_at:
                scheduler.reset_prefix_cache(reset_connector=True)
            preempting |= len(todo) == preempt_at
        if preempting:
            with contextlib.suppress(RuntimeError):
                scheduler.reset_prefix_cache(reset_running_requests=True)
                preempting = False
        if live and rng.random() < abort:
            at = rng.choice(sorted(live))
            live.discard(at)
            aborted.append(at)
            engine.abort_request([str(at)])
        if rng.random() < forget:
            scheduler.reset_prefix_cache()
        for output in engine.step():
            at = int(output.request_id)
            if output.finished and at in live:
                live.discard(at)
                outputs[at] = list(output.outputs[0].token_ids)
                cached += output.num_cached_tokens or 0
                moved = time.monotonic()
        steps += 1
        if time.monotonic() > moved + HANGS_S:
            raise TimeoutError(f"requests that never end: {sorted(live)}")
    return {
        "outputs": {str(at): found for at, found in outputs.items()},
        "aborted": aborted,
        "cached": cached,
        "steps": steps,
        "preempted": counts["preempted"],
    }


def besieged(
    engine: Any,
    greedy: Callable[[int], Any],
    honest: list[list[int]],
    hostile: list[list[int]],
    tokens: int,
    life: int,
    priority: int,
    at_once: int = 2,
    every: int = 1,
) -> dict[str, Any]:
    """Honest requests, so many at once, while with every step (or every so many of those that get
    an honest one further) comes a hostile one, if there are any, that is aborted so many steps
    later. In the order of the honest ones what they are answered and in how many seconds; how many
    of the hostile ones came, and had begun to be served; and the processor's time of the engine's
    own thread."""
    coming, asking, answers = list(enumerate(honest)), set[str](), dict[str, list[int]]()
    began, seconds, before = dict[str, float](), dict[str, float](), time.thread_time()
    alive: list[tuple[int, str]] = []
    served: set[str] = set()
    scheduler = engine.engine_core.engine_core.scheduler
    step, came, further, moved = 0, 0, 0, time.monotonic()
    while coming or asking or alive:
        while coming and len(asking) < at_once:
            at, prompt = coming.pop(0)
            asking.add(f"honest-{at}")
            began[f"honest-{at}"] = time.perf_counter()
            engine.add_request(f"honest-{at}", {"prompt_token_ids": prompt}, greedy(tokens))
        if coming and hostile and (every == 1 or came * every <= further):
            name, prompt = f"hostile-{came}", hostile[came % len(hostile)]
            came += 1
            given = {"prompt_token_ids": prompt}
            engine.add_request(name, given, greedy(tokens), priority=priority)
            alive.append((step + life, name))
        outputs = engine.step()
        further += any(each.request_id in asking for each in outputs)
        for output in outputs:
            if output.finished and output.request_id in asking:
                asking.discard(output.request_id)
                answers[output.request_id] = list(output.outputs[0].token_ids)
                seconds[output.request_id] = time.perf_counter() - began[output.request_id]
                moved = time.monotonic()
        known = scheduler.requests.values()
        served |= {each.request_id for each in known if each.status.name != "WAITING"}
        step += 1
        over = [name for end, name in alive if end <= step or not coming]
        alive = [each for each in alive if each[1] not in over]
        engine.abort_request(over)
        if time.monotonic() > moved + HANGS_S:
            raise TimeoutError(f"requests that never end: {sorted(asking)}")
    return {
        "answers": [answers[f"honest-{at}"] for at in range(len(honest))],
        "seconds": [seconds[f"honest-{at}"] for at in range(len(honest))],
        "own": time.thread_time() - before,
        "whole": time.perf_counter() - min(began.values()),
        "hostile": came,
        "served": sum(name.startswith("hostile") for name in served),
    }


def _count_preemptions(scheduler: Any) -> dict[str, int]:
    counts = {"preempted": 0}
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **named: Any) -> Any:
        counts["preempted"] += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted
    return counts
