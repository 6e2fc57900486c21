"""Loads that spare those who wait behind: a simulated engine that has more to compute than it can.

It schedules as vLLM does: first come, first served, so many tokens a step; a request whose load is
under way holds its blocks and lets others pass.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from statistics import mean

import pytest

from kvtier.cost.model import CostModel, CostSettings
from kvtier.cost.rates import LoadRun
from kvtier.vllm.deferrals import LoadDeadlines
from kvtier.vllm.engine_load import EngineLoad
from kvtier.vllm.requests import Event, Requests

BLOCK_TOKENS = 128
BLOCK_BYTES = 4 << 20
TOKENS_A_SECOND = 10_000.0
STEP_TOKENS = 2048
STEP_SECONDS = 0.005
LATENCY = 0.002
DEADLINE = 10.0


@dataclass
class Request:
    name: str
    came: float
    blocks: int
    hit: int
    decodes: float
    taken: int | None = None
    done: int = 0
    first_token: float = 0.0

    @property
    def left(self) -> int:
        return self.blocks * BLOCK_TOKENS - self.done


@dataclass
class Server:
    """One engine and one link; `policy` is always, never, alone (the model without the crowd),
    waiting (for every load), or all that there is.

    Some loads may take `longer`, and nobody can know which.
    """

    policy: str
    bandwidth: float
    share: float = 0.0
    longer: float = 1.0
    room: int = 1 << 40
    seats: int = 1 << 40
    tells: bool = False
    """The model is told what the engine has to compute before."""
    now: float = 1000.0
    running: list[Request] = field(default_factory=list)
    ready: deque[Request] = field(default_factory=deque)
    waiting: deque[Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        alone = CostSettings(waiting_requests_max=1.0)
        settings = None if self.policy in ("waiting", "all") else alone
        self.model = CostModel(settings, clock=lambda: self.now)
        self.model.observe_prefill(STEP_TOKENS, STEP_TOKENS / TOKENS_A_SECOND)
        self.model.limit("far", DEADLINE)
        for blocks in (32, 64, 128):
            size = blocks * BLOCK_BYTES
            seconds = LATENCY + size / self.bandwidth
            self.now += seconds  # one after the other
            self.model.observe_load("far", size, seconds)
        self.requests = Requests()
        self.engine_load = EngineLoad(self.requests, self.model, lambda: self.now)
        self.patience = LoadDeadlines(
            self.model if self.policy == "all" else None, lambda: self.now, DEADLINE
        )
        self.awaited: dict[int, Request] = {}
        self.late = 0
        self.dice = random.Random(7)
        self.loading: list[tuple[float, float, int]] = []
        self.decoding: list[tuple[float, int]] = []
        self.link_free = self.now
        self.held = 0
        self.tokens = 0

    def serve(self, requests: list[Request]) -> list[float]:
        """The seconds that each waited for its first token."""
        start, coming = self.now, deque(sorted(requests, key=lambda each: each.came))
        while coming or self.waiting or self.running or self.loading or self.ready:
            while coming and start + coming[0].came <= self.now:
                self.waiting.append(coming.popleft())
                self.requests.add(self.waiting[-1].name)
            self.collect()
            work = self.schedule()
            self.requests.stepped()
            if work:
                self.compute(work)
            elif (
                not self.requests.anybody_waits and (number := self.patience.give_up()) is not None
            ):
                self.patience.ended(number)
                self.ready.append(self.awaited.pop(number))
                self.late += 1
            else:
                ends = [self.loading[0][0]] if self.loading else []
                ends += [start + coming[0].came] if coming else []
                ends += [self.decoding[0][0]] if self.decoding else []
                if self.awaited and self.policy == "all":
                    ends.append(self.now + STEP_SECONDS)
                self.now = max(self.now, min(ends, default=self.now))
        return [each.first_token - start - each.came for each in requests]

    def collect(self) -> None:
        while self.loading and self.loading[0][0] <= self.now:
            _, seconds, token = heapq.heappop(self.loading)
            self.model.ended("far", token, True, seconds)
            request = self.awaited.pop(token, None)
            if request is not None:
                self.patience.ended(token)
                assert request.taken is not None
                request.done = request.taken * BLOCK_TOKENS
                self.ready.append(request)
        self.model.collected()
        while self.decoding and self.decoding[0][0] <= self.now:
            self.held -= heapq.heappop(self.decoding)[1]

    def schedule(self) -> list[tuple[Request, int]]:
        work: list[tuple[Request, int]] = []
        budget = STEP_TOKENS

        def run(request: Request) -> None:
            nonlocal budget
            tokens = min(budget, request.left)
            self.engine_load.admitted(request.name, request.done, request.blocks * BLOCK_TOKENS)
            work.append((request, tokens))
            budget -= tokens

        for request in self.running:
            run(request)
        while budget and self.ready:
            self.running.append(self.ready.popleft())
            run(self.running[-1])
        while budget and self.waiting and len(self.running) + len(self.decoding) < self.seats:
            request = self.waiting[0]
            taken = self.ask(request)
            if self.held + request.blocks > self.room:
                break
            self.held += request.blocks
            self.waiting.popleft()
            self.requests.scheduled(request.name)
            if taken:
                self.load(request, taken)
            else:
                self.running.append(request)
                run(request)
        return [each for each in work if each[1]]

    def ask(self, request: Request) -> int:
        self.requests.asked(request.name)
        if self.policy in ("always", "never") or not request.hit:
            return request.hit if self.policy != "never" else 0
        if request.taken is None:
            self.model.observe_waiting(self.requests.behind)
            if self.tells:
                self.engine_load.tell()
            run = LoadRun("far", request.hit, request.hit * BLOCK_BYTES)
            request.taken = self.model.admit([run], BLOCK_TOKENS)
        return request.taken

    def load(self, request: Request, taken: int) -> None:
        request.taken = taken
        self.tokens += 1
        due = self.model.started("far", self.tokens, taken * BLOCK_BYTES)
        self.patience.began(self.tokens, due, 0, taken * BLOCK_TOKENS)
        self.awaited[self.tokens] = request
        seconds = LATENCY + taken * BLOCK_BYTES / self.bandwidth
        if self.dice.random() < self.share:
            seconds *= self.longer
        self.link_free = max(self.link_free, self.now) + seconds
        heapq.heappush(self.loading, (self.link_free, seconds, self.tokens))

    def compute(self, work: list[tuple[Request, int]]) -> None:
        tokens = sum(each for _, each in work)
        seconds = tokens / TOKENS_A_SECOND + STEP_SECONDS
        self.now += seconds
        self.model.observe_prefill(tokens, seconds)
        self.engine_load.stepped({request.name: each for request, each in work})
        for request, each in work:
            request.done += each
            if not request.left:
                request.first_token = self.now
                self.running.remove(request)
                heapq.heappush(self.decoding, (self.now + request.decodes, request.blocks))


def prompts(rate: float | None, count: int, hits: float, decodes: float = 1.0) -> list[Request]:
    """Of 32 to 127 blocks (0.4 to 1.6 s to compute), at random times, or all at once."""
    dice, came, made = random.Random(count), 0.0, []
    for number in range(count):
        came += dice.expovariate(rate) if rate else 0.0
        blocks = dice.randrange(32, 128)
        hit = blocks - 2 if dice.random() < hits else 0
        made.append(Request(str(number), came, blocks, hit, decodes))
    return made


def waits(bandwidth: float, asked: list[Request], **limits: float) -> dict[str, float]:
    """Mean seconds to the first token, by policy."""
    waited = {}
    for policy in ("always", "never", "alone", "waiting", "all"):
        waited[policy] = mean(Server(policy, bandwidth, **limits).serve(copy.deepcopy(asked)))
    return waited


BANDWIDTHS = [
    2e8,
    5e8,
    *(pytest.param(each, marks=pytest.mark.slow) for each in (1e8, 3e8, 1e9, 3e9)),
]
"""Computing is as fast as loading with 330 MB/s."""


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("count", [32, 100])
@pytest.mark.parametrize("hits", [0.7, 1.0])
def test_prompts_that_come_at_once_share_the_engine_and_the_link(
    count: int, hits: float, bandwidth: float
) -> None:
    waited = waits(bandwidth, prompts(None, count, hits))
    assert waited["all"] <= 1.15 * min(waited.values())


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("rate", [0.5, 0.9, 1.2, 1.6])
def test_an_engine_that_is_busy_all_the_time(rate: float, bandwidth: float) -> None:
    """It computes one request a second."""
    waited = waits(bandwidth, prompts(rate, 400, 0.7))
    assert waited["all"] <= 1.05 * min(waited.values())


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize(("rate", "limits"), [(1.2, {}), (1.1, {"seats": 8}), (1.1, {"room": 500})])
def test_one_that_says_what_it_has_to_compute_first(
    rate: float, limits: dict[str, int], bandwidth: float
) -> None:
    asked = prompts(rate, 400, 0.7, decodes=5.0 if limits else 1.0)
    waited = waits(bandwidth, asked, **limits)
    told = mean(Server("all", bandwidth, tells=True, **limits).serve(copy.deepcopy(asked)))
    assert told <= 1.15 * min(waited.values())


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("rate", [0.8, 1.1, 1.5])
@pytest.mark.parametrize("room", [500, 800])
def test_an_engine_short_of_blocks_gains_little_by_long_loads(
    rate: float, bandwidth: float, room: int
) -> None:
    waited = waits(bandwidth, prompts(rate, 400, 0.7, decodes=room / 100), room=room)
    assert waited["all"] <= 1.25 * min(waited.values())


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("rate", [0.8, 1.1, 1.5])
def test_an_engine_that_decodes_as_many_as_it_may(rate: float, bandwidth: float) -> None:
    waited = waits(bandwidth, prompts(rate, 400, 0.7, decodes=8.0), seats=8)
    assert waited["all"] <= 1.25 * min(waited.values())


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("share", "longer"), [(0.1, 20.0), (0.1, 100.0), (0.02, 100.0)])
def test_an_engine_that_has_time_does_not_wait_for_loads_that_hang(
    share: float, longer: float, rate: float, bandwidth: float
) -> None:
    waited = waits(bandwidth, prompts(rate, 400, 0.7), share=share, longer=longer)
    assert waited["all"] <= 1.1 * waited["waiting"]
    if rate < 0.9:
        assert waited["all"] <= 1.3 * min(waited.values())


def came(names: str) -> Requests:
    requests = Requests()
    for name in names:
        requests.add(name)
    return requests


def test_only_those_that_a_whole_step_left_waiting_are_a_crowd() -> None:
    requests = came("abcde")
    requests.asked("a")
    requests.scheduled("a")
    assert requests.behind == 0, "the engine may have room for all of them"
    requests.stepped()
    assert requests.behind == 4
    requests.asked("b")
    assert requests.behind == 3
    requests.add("f")
    requests.add("g")
    assert requests.behind == 4, "these came later"
    requests.remove("c")
    requests.remove("d")
    assert requests.behind == 3


def test_an_engine_that_asks_again_is_short_of_blocks_and_loads_spare_nobody() -> None:
    requests = came("abcdefghijklm")
    for _ in range(2):
        requests.asked("a")
        requests.stepped()
    assert requests.behind == 0
    requests.scheduled("a")
    for name in "bcdefgh":
        requests.asked(name)
        requests.scheduled(name)
        assert requests.behind == 0, "it was a moment ago"
    requests.asked("i")
    requests.scheduled("i")
    assert requests.behind == 4


def test_one_that_is_asked_about_again_where_blocks_are_plenty_is_no_sign_of_it() -> None:
    """A step had too few tokens left for it, or no room for its images."""
    requests = came("abcde")
    for _ in range(2):
        requests.asked("a", scarce=False)
        requests.stepped()
        assert requests.behind == 4
    requests.asked("a", scarce=True)
    assert requests.behind == 4, "nobody knows yet whether it is scheduled"
    requests.stepped()
    requests.asked("a", scarce=False)
    assert requests.behind == 0, "it was not, for want of blocks it seems"
    requests.stepped()
    requests.asked("a", scarce=False)
    assert requests.behind == 0
    requests.scheduled("a")
    assert requests.behind == 0, "a moment ago"


def test_those_that_were_told_to_ask_again_are_no_sign_of_it() -> None:
    requests = came("abc")
    requests.asked("a")
    requests.stepped()
    requests.on(Event.LACKS_ROOM, "a")
    requests.asked("a")
    assert requests.behind == 2


def test_one_that_ends_while_the_engine_is_short_leaves_no_trace() -> None:
    requests = came("abc")
    for _ in range(2):
        requests.asked("a")
        requests.stepped()
    requests.remove("a")
    assert requests.behind == 2
    requests.scheduled("a")
    assert requests.behind == 2


def test_one_that_waits_for_what_another_loads_is_no_sign_of_it() -> None:
    requests = came("abcdef")
    requests.asked("a")
    requests.scheduled("a")
    for _ in range(3):
        requests.asked("b")
        requests.on(Event.PUT_OFF, "b")
        requests.stepped()
        assert requests.behind == 4, "it waits for the load, not for the engine"
    requests.asked("b")
    requests.scheduled("b")
    requests.asked("c")
    assert requests.behind == 3


def test_who_has_no_blocks_yet_waits_for_the_engine_too() -> None:
    requests = came("a")
    assert requests.anybody_waits
    requests.asked("a")
    assert requests.anybody_waits
    requests.on(Event.LACKS_ROOM, "a")
    assert requests.anybody_waits
    requests.asked("a")
    requests.scheduled("a")
    assert not requests.anybody_waits


def test_those_that_were_told_to_ask_again_wait_until_they_end() -> None:
    requests = came("abcd")
    for name in "ab":
        requests.asked(name)
        requests.on(Event.LACKS_ROOM, name)
    requests.stepped()
    assert requests.behind == 4, "those two, and the two behind them"
    requests.remove("a")
    assert requests.behind == 3
    for name in "bcd":
        requests.remove(name)
    assert requests.behind == 0


def test_what_the_crowd_is_worth() -> None:
    """Where the link has hardly a third of the engine's speed, and both have too much to do."""
    waited = waits(1e8, prompts(1.2, 400, 0.7))
    assert waited["alone"] > 30
    assert waited["all"] < 12
