"""An engine as vLLM schedules it, with conversations whose turns come all at once.

Steps are scheduled ahead of the device (two are under way), so many tokens each. A request whose
load is under way holds its blocks and lets others pass. Its load begins when the device has ended
what it was given before, and word of its end comes with the output of the next step that is
launched after it. The device has so many blocks: what is freed stays cached until others need it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, LoadRun
from kvtier.vllm.engine_load import EngineLoad
from kvtier.vllm.requests import Requests
from support.processes.clocks import Clock

CHUNK = 256
TOKEN_BYTES = 128 << 10
CHUNK_BYTES = CHUNK * TOKEN_BYTES
STEP_TOKENS = 8192
STEP_SECONDS = 0.004
SCHEDULE_SECONDS = 0.001
LINK_SECONDS = 0.0005
TOKENS_A_SECOND = 44_600.0
CONTEXT_SHARE = 4e-5
"""By which share a token takes longer for each one before it: 8k at 38,000 a second, 32k at 27,000,
as an 8B model does on an H200."""


@dataclass
class Request:
    user: int
    prompt: int
    decodes: int
    came: float
    hit: int
    """So many of its tokens are in host memory."""
    start: int = 0
    """So many are in the device's own cache."""
    done: int = 0
    decoded: int = 0
    taken: int = 0
    asked: tuple[int, int] | None = None
    first_token: float = math.nan

    @property
    def name(self) -> str:
        return f"{self.user}, {self.prompt}"


class Work(NamedTuple):
    """What a step computes of a request."""

    request: Request
    tokens: int
    context: int
    first_token: bool
    last_token: bool


@dataclass
class Load:
    number: int
    request: Request
    size: int
    seconds: float
    ends: float = math.inf


class Step(NamedTuple):
    work: list[Work]
    arrived: list[Load]
    ends: float


Policy = Callable[["Engine", Request, int], int]
"""How many of so many chunks that a request could load it does."""


@dataclass
class Engine:
    policy: Policy
    bandwidth: float = 40e9
    room: int = 114_688
    """The device has blocks for so many tokens."""
    seats: int = 64
    stall: Callable[[int], float] = lambda tokens: 0.0
    """How long the engine's thread takes to launch a step, while the device is at it already."""
    remembers: bool = True
    """The device's own cache outlives a turn."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.model = CostModel(clock=self.clock)
        self.requests = Requests()
        self.engine_load = EngineLoad(self.requests, self.model, self.clock)
        self.waiting: deque[Request] = deque()
        self.ready: deque[Request] = deque()
        self.running: list[Request] = []
        self.loads: list[Load] = []
        self.steps: deque[Step] = deque()
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.kept: dict[int, int] = {}
        """So much of each user's conversation is in host memory."""
        self.used = self.numbers = self.left = 0
        self.device_free = self.link_free = 0.0

    def serve(self, prompts: list[tuple[int, int]], decodes: int = 16) -> list[float]:
        """The seconds to the first token of requests (user, tokens) that come all at once."""
        asked = [
            Request(user, tokens, decodes, self.clock.now, self.kept.get(user, 0))
            for user, tokens in prompts
        ]
        for request in asked:
            self.waiting.append(request)
            self.requests.add(request.name)
        while self.waiting or self.ready or self.running or self.loads or self.steps:
            self.step()
        if not self.remembers:
            self.cached.clear()
        for request in asked:
            self.kept[request.user] = request.prompt // CHUNK * CHUNK
        return [each.first_token - each.came for each in asked]

    def step(self) -> None:
        """As the engine's core does: schedule ahead, and wait for the oldest step if two are."""
        self.clock.now += SCHEDULE_SECONDS
        self.model.collected()
        work = self.schedule()
        if work or self.waiting or self.ready or self.running or self.loads:
            self.launch(work)
            if work and len(self.steps) < 2:
                return
        self.end(self.steps.popleft())

    # -- scheduling ------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        work: list[Work] = []
        budget = STEP_TOKENS
        for request in self.running:
            budget -= self.compute(request, budget, work)
        while budget and self.ready and len(self.running) < self.seats:
            request = self.ready.popleft()
            self.running.append(request)
            self.engine_load.admitted(request.name, request.done, request.prompt)
            budget -= self.compute(request, budget, work)
        while budget and self.waiting and not self.ready and len(self.running) < self.seats:
            request = self.waiting[0]
            blocks = self.ask(request)
            size = request.prompt + request.decodes
            if self.used + size > self.room:
                break
            self.allocate(request, size)
            self.waiting.popleft()
            self.requests.scheduled(request.name)
            if blocks:
                self.load(request, blocks)
            else:
                request.done = request.start
                self.engine_load.admitted(request.name, request.done, request.prompt)
                self.running.append(request)
                budget -= self.compute(request, budget, work)
        return work

    def compute(self, request: Request, budget: int, work: list[Work]) -> int:
        left = request.prompt - request.done
        tokens = min(left, budget) if left else int(0 < request.decoded < request.decodes)
        if not tokens or not budget:
            return 0
        context = request.done + request.decoded
        if left:
            request.done += tokens
        samples = request.done == request.prompt
        request.decoded += samples
        first = samples and request.decoded == 1
        last = request.decoded == request.decodes
        work.append(Work(request, tokens, context, first, last))
        return tokens

    def ask(self, request: Request) -> int:
        request.start = min(self.cached.get(request.user, 0), request.prompt - 1) // 16 * 16
        free = self.room - self.used
        self.requests.asked(request.name, free < 2 * request.prompt)
        first = request.start // CHUNK
        blocks = min(request.hit, request.prompt - 1) // CHUNK - first
        if blocks <= 0:
            return 0
        if request.asked != (first, blocks):
            request.asked = first, blocks
            request.taken = self.policy(self, request, blocks)
            self.left += blocks - request.taken
        return request.taken

    def allocate(self, request: Request, size: int) -> None:
        self.cached.pop(request.user, None)
        self.used += size
        excess = self.used + sum(self.cached.values()) - self.room
        while excess > 0:
            user, tokens = next(iter(self.cached.items()))
            taken = min(tokens, excess)
            excess -= taken
            self.cached[user] -= taken
            if taken == tokens:
                del self.cached[user]

    def load(self, request: Request, blocks: int) -> None:
        self.numbers += 1
        request.done = (request.start // CHUNK + blocks) * CHUNK
        size = blocks * CHUNK_BYTES
        self.model.started(DEVICE, self.numbers, size)
        self.loads.append(Load(self.numbers, request, size, LINK_SECONDS + size / self.bandwidth))

    # -- the device ------------------------------------------------------------------------

    def launch(self, work: list[Work]) -> None:
        each = {each.request.name: each.tokens for each in work}
        prompts = [each for each in work if each.tokens >= 32]
        tokens = sum(each.tokens for each in prompts)
        middles = sum(each.tokens * (each.context + each.tokens / 2) for each in prompts)
        self.engine_load.stepped(each)
        context = int(middles / tokens - tokens / 2) if tokens else 0
        self.engine_load.pace.began(tokens, context)
        begins = max(self.clock.now, self.device_free)
        for load in self.loads:
            if load.ends == math.inf:
                self.link_free = load.ends = max(self.link_free, begins) + load.seconds
        ends = self.clock.now
        if work:
            ends = self.device_free = begins + self.seconds(work)
            self.clock.now += self.stall(tokens)
        elif not self.steps and self.loads:
            self.clock.now = max(self.clock.now, min(load.ends for load in self.loads))
        arrived = [load for load in self.loads if load.ends <= self.clock.now]
        self.loads = [load for load in self.loads if load.ends > self.clock.now]
        self.steps.append(Step(work, arrived, ends))

    def seconds(self, work: list[Work]) -> float:
        """How long the device takes for a step."""
        each = 1 / TOKENS_A_SECOND
        return STEP_SECONDS + sum(
            tokens * each * (1 + CONTEXT_SHARE * (context + tokens / 2))
            for _, tokens, context, _, _ in work
            if tokens > 1
        )

    def end(self, step: Step) -> None:
        self.clock.now = max(self.clock.now, step.ends)
        for load in step.arrived:
            self.model.ended(DEVICE, load.number, True, load.seconds)
            self.ready.append(load.request)
        for work in step.work:
            if work.first_token:
                work.request.first_token = self.clock.now
            if work.last_token:
                self.running.remove(work.request)
                size = work.request.prompt + work.request.decodes
                self.used -= size
                self.cached[work.request.user] = work.request.prompt
        self.engine_load.pace.ended()


def always(engine: Engine, request: Request, blocks: int) -> int:
    return blocks


def never(engine: Engine, request: Request, blocks: int) -> int:
    return 0


def model(engine: Engine, request: Request, blocks: int) -> int:
    """The cost model, told what vLLM's connector tells it."""
    engine.engine_load.tell()
    first = request.start // CHUNK
    return engine.model.admit([LoadRun(DEVICE, blocks, blocks * CHUNK_BYTES)], CHUNK, first * CHUNK)


def turns(users: int) -> list[list[tuple[int, int]]]:
    """Conversations of 2k tokens that grow by 1k in each of five more turns, all users at once."""
    return [[(user, 2057 + 1024 * turn) for user in range(users)] for turn in range(6)]


def settled(policy: Policy, **how: Any) -> Engine:
    """An engine whose rates are known, because it has served somebody, and nothing is kept."""
    engine = Engine(always, **{**how, "remembers": False})
    for turn in turns(1):
        engine.serve(turn)
    engine.kept.clear()
    engine.policy, engine.remembers, engine.left = policy, how.get("remembers", True), 0
    return engine


def converse(engine: Engine, users: int) -> list[float]:
    """The seconds to each first token of so many conversations."""
    return [seconds for turn in turns(users) for seconds in engine.serve(turn)]


def greedily(users: int, **how: Any) -> list[float]:
    """The same of an oracle that tries several futures at each decision: to load nothing, half of
    the hit or all of it, where all others load all; and goes on with the best for all."""
    engine, waited = settled(always, **how), []
    for turn in turns(users):
        made: list[int] = []
        asked = partial(_outcome, engine, turn)
        while len(made) < len(asked(made)[1]):
            hit = asked(made)[1][len(made)]
            made.append(min((hit, hit // 2, 0), key=lambda count: sum(asked([*made, count])[0])))
        engine, seconds = asked(made)[2], asked(made)[0]
        waited += seconds
    return waited


def _outcome(
    engine: Engine, turn: list[tuple[int, int]], made: list[int]
) -> tuple[list[float], list[int], Engine]:
    """What comes of a turn if these are the first decisions, and all hits that were decided on."""
    future, hits = deepcopy(engine), []
    script = iter(made)

    def policy(engine: Engine, request: Request, blocks: int) -> int:
        hits.append(blocks)
        return min(blocks, next(script, blocks))

    future.policy = policy
    seconds = future.serve(turn)
    future.policy = always
    return seconds, hits, future
