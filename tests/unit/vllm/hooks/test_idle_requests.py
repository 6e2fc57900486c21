"""What vLLM is not told of a step costs no chunk: it would have found nothing to store there."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks.idle_requests import IdleRequests

REQUESTS = 6


@dataclasses.dataclass
class Cached:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Cached


class Storing:
    """vLLM's side as far as it matters: in each step it stores all chunks of those that it is told
    of which are whole after it."""

    def __init__(self, chunks: tuple[int, ...], prompt_only: bool, prompts: list[int]) -> None:
        groups = [SimpleNamespace(tokens_per_chunk=tokens) for tokens in chunks]
        self.config = SimpleNamespace(offload_prompt_only=prompt_only, kv_group_configs=groups)
        self._req_status = {
            str(at): SimpleNamespace(
                req=SimpleNamespace(num_prompt_tokens=prompt),
                max_offload_tokens=None if at else 100,
                group_states=[SimpleNamespace(next_stored_chunk_idx=0) for _ in chunks],
            )
            for at, prompt in enumerate(prompts)
        }
        self.stored: list[tuple[int, str, int, int]] = []
        self.blocks: list[tuple[str, Any]] = []
        self.asked = 0

    def step(self, number: int, scheduled: Scheduled, computed: dict[str, int]) -> None:
        cached = scheduled.scheduled_cached_reqs
        told = zip(cached.req_ids, cached.new_block_ids, strict=True)
        self.blocks += [each for each in told if each[1] is not None]
        assert set(scheduled.num_scheduled_tokens) <= set(cached.req_ids), "it makes keys of these"
        for name, count in scheduled.num_scheduled_tokens.items():
            self.asked += 1
            status = self._req_status[name]
            tokens = computed[name] + count
            if status.max_offload_tokens is not None:
                tokens = min(tokens, status.max_offload_tokens)
            if self.config.offload_prompt_only:
                tokens = min(tokens, status.req.num_prompt_tokens)
            groups = zip(self.config.kv_group_configs, status.group_states, strict=True)
            for at, (group, state) in enumerate(groups):
                whole = tokens // group.tokens_per_chunk
                chunks = range(state.next_stored_chunk_idx, whole)
                self.stored += [(number, name, at, chunk) for chunk in chunks]
                state.next_stored_chunk_idx = max(state.next_stored_chunk_idx, whole)


@pytest.mark.parametrize("chunks", [(16,), (16, 48), (128, 16)])
@pytest.mark.parametrize("prompt_only", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_all_is_stored_in_the_same_step(
    chunks: tuple[int, ...], prompt_only: bool, seed: int
) -> None:
    """Of prompts in pieces, of requests that decode, guess ahead, or begin anew after a reset."""
    dice = random.Random(seed)
    prompts = [dice.randrange(1, 300) for _ in range(REQUESTS)]
    plain, spared = (Storing(chunks, prompt_only, prompts) for _ in range(2))
    resting = IdleRequests(spared)
    computed = {str(at): 0 for at in range(REQUESTS)}
    for number in range(300):
        names = sorted(dice.sample(sorted(computed), dice.randrange(1, REQUESTS + 1)))
        counts = {
            name: dice.randrange(1, 64)
            if computed[name] < prompts[int(name)]
            else dice.choice([1, 3])
            for name in names
        }
        if dice.random() < 0.02:  # preempted, or its load has failed
            resting.wake(again := dice.choice(names))
            computed[again] = 0
            for storing in (plain, spared):
                for state in storing._req_status[again].group_states:
                    state.next_stored_chunk_idx = 0
        blocks = [([number],) if dice.random() < 0.1 else None for _ in names]
        cached = Cached(names, set(), blocks, [computed[name] for name in names])
        scheduled = Scheduled(counts, cached)
        plain.step(number, scheduled, computed)
        told = resting.leave_out(scheduled)
        spared.step(number, told, computed)
        resting.looked_at(told)
        for name, count in counts.items():
            computed[name] += count
    assert spared.stored == plain.stored
    assert spared.blocks == plain.blocks
    assert spared.asked < plain.asked * (0.3 if prompt_only else 0.9)


def test_nothing_is_remembered_of_those_that_have_ended() -> None:
    storing = Storing((16,), True, [20])
    resting = IdleRequests(storing)
    cached = Cached(["0"], set(), [None], [16])
    scheduled = Scheduled({"0": 1}, cached)
    storing.step(0, scheduled, {"0": 16})
    resting.looked_at(scheduled)
    assert resting.leave_out(scheduled).num_scheduled_tokens == {}
    resumed = dataclasses.replace(cached, resumed_req_ids={"0"})
    begun = dataclasses.replace(scheduled, scheduled_cached_reqs=resumed)
    assert resting.leave_out(begun) is begun, "it has other blocks now"
    resting.wake("0")
    assert resting.leave_out(scheduled) is scheduled
    resting.looked_at(scheduled)
    resting.wake_all()
    assert resting.leave_out(scheduled) is scheduled
