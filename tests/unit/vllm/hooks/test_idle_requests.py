"""What vLLM is not told of a step costs no chunk: it would have found nothing to store there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks.idle_requests import IdleRequests

REQUESTS, BLOCK = 6, 8


@dataclasses.dataclass
class Cached:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Cached
    scheduled_new_reqs: Sequence[Any] = ()
    finished_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()
    kv_cache_block_copies: Sequence[Any] = ()
    kv_connector_block_state: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Request:
    """One of the engine's, and vLLM's notes of it."""

    def __init__(self, prompt: int, limit: int | None, chunks: tuple[int, ...]) -> None:
        self.req = self
        self.num_prompt_tokens, self.num_computed_tokens = prompt, 0
        self.max_offload_tokens = limit
        self.group_states = [SimpleNamespace(next_stored_chunk_idx=0, block_ids=[]) for _ in chunks]
        self.ended = False

    def is_finished(self) -> bool:
        return self.ended

    def update_block_id_groups(self, blocks: tuple[list[int], ...]) -> None:
        for state, new in zip(self.group_states, blocks, strict=True):
            state.block_ids.extend(new)


class Storing:
    """vLLM's side as far as it matters: in each step it stores all chunks of those that it is told
    of which are whole after it, from the blocks that it has been told of."""

    def __init__(
        self, chunks: tuple[int, ...], prompt_only: bool, prompts: list[int], windowed: bool = False
    ) -> None:
        groups = [
            SimpleNamespace(
                tokens_per_chunk=tokens,
                sliding_window_size_in_chunks=4 if windowed and at else None,
            )
            for at, tokens in enumerate(chunks)
        ]
        self.config = SimpleNamespace(offload_prompt_only=prompt_only, kv_group_configs=groups)
        self._req_status = {
            str(at): Request(prompt, None if at else 100, chunks)
            for at, prompt in enumerate(prompts)
        }
        self._current_batch_load_jobs: dict[int, Any] = {}
        self._current_batch_jobs_to_flush: set[int] = set()
        self._current_batch_allocated_block_ids: set[int] = set()
        self._block_id_to_pending_jobs: dict[int, Any] = {}
        self.stored: list[tuple[int, str, int, int, int]] = []
        self.asked = 0

    def step(self, number: int, scheduled: Scheduled) -> None:
        cached, new = scheduled.scheduled_cached_reqs, scheduled.scheduled_new_reqs
        told = [(each.req_id, each.block_ids) for each in new]
        told += zip(cached.req_ids, cached.new_block_ids, strict=True)
        for name, blocks in told:
            status = self._req_status[name]
            if name in cached.resumed_req_ids:
                for state in status.group_states:
                    state.block_ids = []
            if blocks is not None:
                status.update_block_id_groups(blocks)
        assert scheduled.num_scheduled_tokens.keys() <= dict(told).keys(), "it makes keys of these"
        for name, count in scheduled.num_scheduled_tokens.items():
            self.asked += 1
            status = self._req_status[name]
            tokens = status.num_computed_tokens + count
            if status.max_offload_tokens is not None:
                tokens = min(tokens, status.max_offload_tokens)
            if self.config.offload_prompt_only:
                tokens = min(tokens, status.num_prompt_tokens)
            groups = zip(self.config.kv_group_configs, status.group_states, strict=True)
            for at, (group, state) in enumerate(groups):
                whole = tokens // group.tokens_per_chunk
                for chunk in range(state.next_stored_chunk_idx, whole):
                    block = state.block_ids[chunk * group.tokens_per_chunk // BLOCK]
                    self.stored.append((number, name, at, chunk, block))
                state.next_stored_chunk_idx = max(state.next_stored_chunk_idx, whole)

    def advance(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self._req_status[name].num_computed_tokens += count


class Engine:
    """Gives tokens and blocks to requests: prompts in pieces, decoding, drafts that are refused,
    and some that begin anew."""

    def __init__(self, seed: int, prompts: list[int], chunks: tuple[int, ...]) -> None:
        self.dice = random.Random(seed)
        self.prompts = prompts
        self.groups = len(chunks)
        self.computed = {str(at): 0 for at in range(len(prompts))}
        self.blocks = dict.fromkeys(self.computed, 0)
        self.known: set[str] = set()
        self.serial = 0

    def schedule(self, sides: Sequence[Storing]) -> Scheduled:
        dice, computed = self.dice, self.computed
        names = sorted(dice.sample(sorted(computed), dice.randrange(1, len(computed) + 1)))
        resumed = {dice.choice(names)} if dice.random() < 0.02 else set()
        for name in resumed:
            computed[name] = self.blocks[name] = 0
            for side in sides:
                side._req_status[name].num_computed_tokens = 0
                for state in side._req_status[name].group_states:
                    state.next_stored_chunk_idx = 0
        counts = {
            name: dice.randrange(1, 64)
            if computed[name] < self.prompts[int(name)]
            else dice.choice([1, 1, 1, 3])
            for name in names
        }
        given = {name: self._give(name, computed[name] + counts[name]) for name in names}
        fresh = [name for name in names if name not in self.known]
        self.known.update(fresh)
        new = [SimpleNamespace(req_id=name, block_ids=given.pop(name)) for name in fresh]
        cached = Cached(list(given), resumed & given.keys(), list(given.values()))
        return Scheduled(counts, cached, new)

    def _give(self, name: str, tokens: int) -> tuple[list[int], ...] | None:
        more = -(-tokens // BLOCK) - self.blocks[name]
        if more <= 0:
            return None
        self.blocks[name] += more
        first, self.serial = self.serial, self.serial + more
        return (list(range(first, self.serial)),) * self.groups

    def end(self, counts: dict[str, int], sides: Sequence[Storing]) -> None:
        """The step's tokens are there; some drafts of it were wrong."""
        for name, count in counts.items():
            wrong = self.dice.randrange(count) if count == 3 else 0
            self.computed[name] += count - wrong
            for side in sides:
                side._req_status[name].num_computed_tokens += count - wrong


def took(resting: IdleRequests, storing: Storing, number: int, scheduled: Scheduled) -> bool:
    """A step as the connector takes it; whether vLLM's side was told of it."""
    if resting.all_rest(scheduled, None):
        return False
    told = resting.leave_out(scheduled)
    storing.step(number, told)
    resting.looked_at(told)
    return True


@pytest.mark.parametrize("chunks", [(16,), (16, 48), (128, 16)])
@pytest.mark.parametrize("prompt_only", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_all_is_stored_in_the_same_step_from_the_same_blocks(
    chunks: tuple[int, ...], prompt_only: bool, seed: int
) -> None:
    """Of prompts in pieces, of requests that decode, guess ahead, or begin anew."""
    dice = random.Random(seed)
    prompts = [dice.randrange(1, 300) for _ in range(REQUESTS)]
    sides = [Storing(chunks, prompt_only, prompts, windowed=seed % 2 == 1) for _ in range(2)]
    plain, spared = sides
    engine, resting = Engine(seed, prompts, chunks), IdleRequests(spared)
    told = 0
    for number in range(400):
        scheduled = engine.schedule(sides)
        plain.step(number, scheduled)
        told += took(resting, spared, number, scheduled)
        engine.end(scheduled.num_scheduled_tokens, sides)
    assert spared.stored == plain.stored
    assert spared.asked < plain.asked * (0.3 if prompt_only else 0.9)
    assert told < (200 if prompt_only else 401)


def decoding(
    storing: Storing, resting: IdleRequests, blocks: tuple[list[int], ...] = ([1, 2],)
) -> Scheduled:
    """The step after one that has stored all there is of a request's prompt."""
    request = storing._req_status["0"]
    request.num_computed_tokens = 16
    resting.wake("0")
    assert took(resting, storing, 0, Scheduled({"0": 1}, Cached(["0"], set(), [blocks])))
    request.num_computed_tokens += 1
    return Scheduled({"0": 1}, Cached(["0"], set(), [None]))


def test_those_that_begin_anew_or_were_reset_are_looked_at() -> None:
    storing = Storing((16,), True, [20])
    resting = IdleRequests(storing)
    scheduled = decoding(storing, resting)
    assert resting.all_rest(scheduled, None)
    resumed = dataclasses.replace(scheduled.scheduled_cached_reqs, resumed_req_ids={"0"})
    begun = dataclasses.replace(scheduled, scheduled_cached_reqs=resumed)
    assert not resting.all_rest(begun, None)
    assert resting.leave_out(begun) is begun, "it has other blocks now"
    for wake in (lambda: resting.wake("0"), resting.wake_all):
        assert took(resting, storing, 1, begun)
        assert resting.all_rest(scheduled, None)
        wake()
        assert not resting.all_rest(scheduled, None)
        assert resting.leave_out(scheduled) is scheduled


@pytest.mark.parametrize(
    "change",
    [
        {"scheduled_new_reqs": [SimpleNamespace(req_id="1", block_ids=([3],))]},
        {"finished_req_ids": {"1"}},
        {"preempted_req_ids": {"1"}},
        {"kv_cache_block_copies": [SimpleNamespace(dst_block_id=5)]},
        {"kv_connector_block_state": SimpleNamespace(boundary_state_offloads={"0": []})},
    ],
)
def test_a_step_in_which_anything_else_happens_is_told(change: dict[str, Any]) -> None:
    storing = Storing((16,), True, [20])
    resting = IdleRequests(storing)
    scheduled = decoding(storing, resting)
    idle = SimpleNamespace(boundary_state_offloads={})
    assert resting.all_rest(dataclasses.replace(scheduled, kv_connector_block_state=idle), None)
    assert not resting.all_rest(dataclasses.replace(scheduled, **change), None)


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("_current_batch_load_jobs", {1: "job"}),
        ("_current_batch_jobs_to_flush", {1}),
        ("_current_batch_allocated_block_ids", {1}),
        ("_step_region", "the manager's lock, which vLLM 0.33 lets go of when it is told"),
    ],
)
def test_what_vllms_side_has_still_to_do_is_done(what: str, left: Any) -> None:
    storing = Storing((16,), True, [20])
    resting = IdleRequests(storing)
    scheduled = decoding(storing, resting)
    assert resting.all_rest(scheduled, None)
    setattr(storing, what, left)
    assert not resting.all_rest(scheduled, None)


def test_blocks_that_may_be_stored_from_are_told_when_they_change_hands() -> None:
    storing = Storing((16,), True, [20])
    resting = IdleRequests(storing)
    scheduled = decoding(storing, resting)
    storing._block_id_to_pending_jobs = {7: {1}}
    none, some = (SimpleNamespace(any=any, forget=lambda: None) for any in (False, True))
    assert resting.all_rest(scheduled, none)
    assert not resting.all_rest(scheduled, some)
    assert not resting.all_rest(scheduled, None)
    crossing = dataclasses.replace(scheduled.scheduled_cached_reqs, new_block_ids=[([7],)])
    assert not resting.all_rest(
        dataclasses.replace(scheduled, scheduled_cached_reqs=crossing), none
    )


@pytest.mark.parametrize("prompt_only", [True, False])
def test_blocks_of_what_is_decoded_are_told_where_that_is_stored(prompt_only: bool) -> None:
    """vLLM would look through them in each step, as it does with those of windows."""
    storing = Storing((16,), prompt_only, [20])
    resting = IdleRequests(storing)
    scheduled = decoding(storing, resting)
    crossing = dataclasses.replace(scheduled.scheduled_cached_reqs, new_block_ids=[([7],)])
    ended = dataclasses.replace(scheduled, scheduled_cached_reqs=crossing, finished_req_ids={"1"})
    assert not resting.all_rest(ended, None)
    told = resting.leave_out(ended)
    assert told.scheduled_cached_reqs.new_block_ids == ([] if prompt_only else [([7],)])
    assert told.num_scheduled_tokens == {}


def test_blocks_of_windows_that_will_be_stored_from_are_told() -> None:
    """vLLM must notice which of those before them have been given to others."""
    for windowed in (False, True):
        storing = Storing((16, 16), False, [20], windowed=windowed)
        resting = IdleRequests(storing)
        scheduled = decoding(storing, resting, blocks=([1, 2], [3, 4]))
        crossing = dataclasses.replace(scheduled.scheduled_cached_reqs, new_block_ids=[([7], [8])])
        crossed = dataclasses.replace(scheduled, scheduled_cached_reqs=crossing)
        assert resting.all_rest(crossed, None) is not windowed


def test_nothing_is_remembered_of_those_that_have_ended() -> None:
    storing = Storing((16,), False, [20])
    resting = IdleRequests(storing)
    decoding(storing, resting)
    storing._req_status["0"].ended = True
    resting.forget("0")
    resting.wake("0")
    assert [*resting._until, *resting._growing, *resting._awake] == []
    del storing._req_status["0"]
    assert resting.all_rest(Scheduled({"1": 99}, Cached(["1"], set(), [None])), None)
    assert not resting._due
