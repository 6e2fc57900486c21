"""What the /metrics of servers say of their cache, in the figures that people look at.

`kvtier top` draws them in a terminal and on a page. A figure is of the last minute or since the
server's start; the first reading has only the latter.
"""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import NamedTuple

import msgspec

from kvtier.vllm.server_process import Samples, samples_of

WINDOW_S = 60.0
HISTORY_S = 600.0
_PATIENCE_S = 5.0
_BYTES_MAX = 1 << 26
_STARTED = "process_start_time_seconds"
_WANTED = ("kvtier:", "vllm:prompt_tokens", "vllm:num_requests", "vllm:kv_offload", _STARTED)
_MODEL = re.compile(r'model_name="([^"]*)"')

COMPUTED, ENGINE, LOADED = "computed", "engine", "loaded"
"""Where prompts come from: the engine computes them, has them itself, or loads them from tiers."""

# Counters that stay at 0 where all is well; what each says, and whether somebody should act.
_TROUBLES = {
    "kvtier:corrupt_blocks_total": ("blocks in {tier} did not verify, and are quarantined", True),
    "kvtier:internal_errors_total": ("exceptions were caught at the border to vLLM", True),
    "kvtier:mover_restarts_total": ("deaths of the mover's process", True),
    "kvtier:mover_timeouts_total": ("transfers were given up", True),
    "kvtier:load_failures_total": ("blocks could not be loaded from {tier} ({reason})", True),
    "kvtier:store_failures_total": ("blocks could not be written to {tier} ({reason})", True),
    "kvtier:failed_loads_total": ("requests were recomputed: a load failed", True),
    "kvtier:late_loads_total": ("loads took longer than computing", False),
    "kvtier:store_drops_total": ("blocks were not written to {tier} ({reason})", False),
    "kvtier:dropped_blocks_total": ("blocks found no room in {tier}, or failed", False),
    "kvtier:retain_refused_blocks_total": ("blocks in {tier} found no place to be retained", False),
}


class TierFigures(msgspec.Struct):
    """One kind of tier of a server."""

    kind: str
    down: bool
    blocks: float
    used: float
    capacity: float
    retained: float
    waiting: float
    """Blocks that wait to be written to it, those that outlived a restart too."""
    hit_blocks: float
    """Since the start; what follows is a second."""
    hits: float
    read: float
    written: float


class FirstTokenFigures(msgspec.Struct):
    """First tokens of requests whose prompts were got in one way."""

    requests: float
    seconds: float
    """On average; so are the tokens of their prompts."""
    tokens: float


class Trouble(msgspec.Struct):
    """Something that should not be, and how often it was."""

    what: str
    total: float
    """0 of what is so now."""
    lately: float
    grave: bool


class Period(msgspec.Struct):
    """What happened in some time."""

    seconds: float
    """How long ago it began; 0 if nobody knows, since the start."""
    prompt_tokens: float
    shares: dict[str, float]
    """Of the prompt tokens: computed, the engine's own, and each tier's."""
    first_tokens: dict[str, FirstTokenFigures]
    """Of prompts of which something was loaded, of those that the engine had itself in part, and
    of those that were computed."""
    misses: dict[str, float]
    """Prompt tokens that were asked for and not found, by reason."""


class Point(msgspec.Struct):
    """One moment of a server's last minutes."""

    at: float
    shares: dict[str, float]
    first_tokens: dict[str, float]
    waiting: float


class ServerFigures(msgspec.Struct):
    """All that is shown of one server; only its name and the problem, if it could not be read."""

    url: str
    problem: str = ""
    model: str = ""
    uptime: float | None = None
    running: float = 0
    waiting: float = 0
    in_mover: float = 0
    periods: list[Period] = []
    """The last minute, from the second reading on, and all since the start."""
    tiers: list[TierFigures] = []
    troubles: list[Trouble] = []
    history: list[Point] = []


class Growth:
    """By how much counters have grown between two readings."""

    def __init__(self, before: Samples, after: Samples, seconds: float) -> None:
        self._before, self._after = before, after
        self.seconds = seconds

    def of(self, name: str, **labels: str) -> float:
        """The growth of all samples of this name that have these labels."""
        wanted = labels.items()
        return sum(value for found, value in self.each(name) if wanted <= found.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The growth by the values of one label, in the order of the reading."""
        found: dict[str, float] = {}
        for labels, value in self.each(name):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found

    def each(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """The growth of each sample of this name, with its labels."""
        for key, value in self._after.items():
            if key[0] == name:
                yield dict(key[1]), max(0.0, value - self._before.get(key, 0.0))

    def a_second(self, name: str, **labels: str) -> float:
        """The same as a rate; 0 if nobody knows in how long it grew."""
        return self.of(name, **labels) / self.seconds if self.seconds > 0 else 0.0


class _Reading(NamedTuple):
    at: float
    samples: Samples


class ServerWatch:
    """Reads one server's metrics again and again."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self._clock = clock
        self._readings: deque[_Reading] = deque()
        self._history: deque[Point] = deque()

    def look(self) -> ServerFigures:
        """Read it once more; says why in its `problem` if that fails."""
        try:
            text = _get(self.url + "/metrics")
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            return ServerFigures(self.url, f"cannot be read: {reason}", history=[*self._history])
        return self.take(text)

    def take(self, text: str) -> ServerFigures:
        """The figures by what it serves now."""
        if "kvtier:" not in text:
            return ServerFigures(self.url, "serves no metrics of kvtier; start it by kvtier serve")
        now = self._clock()
        samples = {
            key: value
            for key, value in samples_of(text).items()
            if key[0].startswith(_WANTED) and math.isfinite(value)
        }
        if self._readings and _began_anew(self._readings[-1].samples, samples):
            self._readings.clear()
            self._history.clear()
        self._readings.append(_Reading(now, samples))
        while self._readings[0].at < now - WINDOW_S:
            self._readings.popleft()
        found = _figures(self.url, self._readings[0], self._readings[-1])
        model = _MODEL.search(text)
        found.model = model[1] if model else ""
        self._remember(now, found)
        return found

    def _remember(self, now: float, found: ServerFigures) -> None:
        lately = found.periods[0]
        times = {how: each.seconds for how, each in lately.first_tokens.items()}
        self._history.append(Point(now, lately.shares, times, found.waiting))
        while self._history[0].at < now - HISTORY_S:
            self._history.popleft()
        found.history = [*self._history]


class Watch:
    """Reads several servers at once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [ServerWatch(url) for url in urls]
        self._pool = ThreadPoolExecutor(len(urls), "reader")

    def look(self) -> list[ServerFigures]:
        """The figures of each, in their order."""
        return list(self._pool.map(ServerWatch.look, self._servers))


def _get(url: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=_PATIENCE_S) as answer:
        return str(answer.read(_BYTES_MAX).decode(errors="replace"))


def _began_anew(before: Samples, after: Samples) -> bool:
    """Whether another process answers than before: its counters begin at 0."""
    return any(
        value < before.get(key, 0.0)
        for key, value in after.items()
        if key[0].endswith("_total") and key[0].startswith("kvtier:")
    )


def _figures(url: str, first: _Reading, last: _Reading) -> ServerFigures:
    gauges = Growth({}, last.samples, 0)
    started = gauges.of(_STARTED)
    uptime = last.at - started if started else None
    always = Growth({}, last.samples, uptime or 0.0)
    lately = Growth(first.samples, last.samples, last.at - first.at) if first is not last else None
    return ServerFigures(
        url,
        uptime=uptime,
        running=gauges.of("vllm:num_requests_running"),
        waiting=gauges.of("vllm:num_requests_waiting"),
        in_mover=gauges.of("kvtier:queued_blocks"),
        periods=[_period(each, always) for each in (lately, always) if each is not None],
        tiers=_tiers(gauges, always, lately or always),
        troubles=_troubles(gauges, always, lately),
    )


def _period(growth: Growth, always: Growth) -> Period:
    tokens = growth.by("vllm:prompt_tokens_by_source_total", "source")
    blocks = growth.by("kvtier:hit_blocks_total", "tier")
    if not sum(blocks.values()):  # the tokens are counted a little later than the blocks
        blocks = always.by("kvtier:hit_blocks_total", "tier")
    loaded, found = tokens.get("external_kv_transfer", 0.0), sum(blocks.values())
    total = sum(tokens.values())
    parts = {
        COMPUTED: tokens.get("local_compute", 0.0),
        ENGINE: tokens.get("local_cache_hit", 0.0),
        **{tier: loaded * count / found if found else 0.0 for tier, count in blocks.items()},
    }
    misses = growth.by("kvtier:missed_tokens_total", "reason")
    return Period(
        growth.seconds,
        total,
        {source: part / total for source, part in parts.items()} if total else {},
        _first_tokens(growth),
        {reason: count for reason, count in misses.items() if count},
    )


def _first_tokens(growth: Growth) -> dict[str, FirstTokenFigures]:
    name = "kvtier:first_token_seconds"
    tokens = growth.by("kvtier:first_token_prompt_tokens_total", "prompt")
    seconds = growth.by(f"{name}_sum", "prompt")
    return {
        how: FirstTokenFigures(count, seconds[how] / count, tokens.get(how, 0.0) / count)
        for how, count in growth.by(f"{name}_count", "prompt").items()
        if count
    }


def _tiers(gauges: Growth, always: Growth, lately: Growth) -> list[TierFigures]:
    found = []
    for index, kind in enumerate(gauges.by("kvtier:bytes_capacity", "tier")):
        waiting = ("kvtier:waiting_blocks", "kvtier:catchup_backlog_blocks")
        written = lately.a_second("kvtier:written_bytes_total", tier=kind)
        found.append(
            TierFigures(
                kind=kind,
                down=gauges.of("kvtier:tier_down", tier=kind) > 0,
                blocks=gauges.of("kvtier:blocks", tier=kind),
                used=gauges.of("kvtier:bytes_used", tier=kind),
                capacity=gauges.of("kvtier:bytes_capacity", tier=kind),
                retained=gauges.of("kvtier:retained_blocks", tier=kind),
                waiting=sum(gauges.of(name, tier=kind) for name in waiting),
                hit_blocks=always.of("kvtier:hit_blocks_total", tier=kind),
                hits=lately.a_second("kvtier:hit_blocks_total", tier=kind),
                read=lately.a_second("kvtier:hit_bytes_total", tier=kind),
                written=written if index else lately.a_second("vllm:kv_offload_store_bytes_total"),
            )
        )
    return found


def _troubles(gauges: Growth, always: Growth, lately: Growth | None) -> list[Trouble]:
    """What is wrong now first, then what somebody should act on, then the rest."""
    found = [
        Trouble(f"{tier} is left alone, because it fails", 0, 1, True)
        for tier in gauges.by("kvtier:tier_down", "tier")
        if gauges.of("kvtier:tier_down", tier=tier)
    ]
    for name, (text, grave) in _TROUBLES.items():
        for labels, total in always.each(name):
            if total:
                recent = lately.of(name, **labels) if lately is not None else 0.0
                said = text.format_map(defaultdict(lambda: "unknown", labels))  # it may be older
                found.append(Trouble(said, total, recent, grave))
    return sorted(found, key=lambda each: (not each.lately, not each.grave))
