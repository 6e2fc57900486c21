"""What is seen of kvtier on vLLM's /metrics: counters, gauges and histograms, by tier."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import Gauge

from kvtier import guard
from kvtier.chain.stats import ChainStats
from kvtier.cost.rates import LinkCosts
from kvtier.interfaces.write_budget import WriteStats
from kvtier.types import TierStats
from kvtier.vllm.hooks import interfaces
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.protocol import Report

_EVERY_S = 0.5
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_TRANSFER, _FIRST_TOKEN = "kvtier:transfer_seconds", "kvtier:first_token_seconds"
_FIRST_TOKEN_TOKENS = "kvtier:first_token_prompt_tokens"
_DOWN, _MISSES = "kvtier:tier_down", "kvtier:miss_blocks"
_ENDURANCE = "kvtier:drive_endurance_used_ratio"

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kvtier:hit_blocks": ("Blocks that loads found in a tier", ("tier",)),
    "kvtier:hit_bytes": ("Bytes that loads found in a tier", ("tier",)),
    _MISSES: (
        "Blocks that requests asked for and neither a tier nor those above it held",
        ("tier",),
    ),
    "kvtier:neighbour_loaded_blocks": (
        "Blocks read from what another engine of the machine has in a tier",
        ("tier",),
    ),
    "kvtier:stored_blocks": ("Blocks committed to a tier", ("tier",)),
    "kvtier:written_bytes": ("Bytes written to a tier, before compression", ("tier",)),
    "kvtier:evicted_blocks": ("Blocks evicted from a tier", ("tier",)),
    "kvtier:corrupt_blocks": ("Blocks that failed verification, quarantined", ("tier",)),
    "kvtier:dropped_blocks": (
        "Blocks that a tier had no room for, or whose store failed",
        ("tier",),
    ),
    "kvtier:load_failures": ("Blocks that could not be loaded from a tier", ("tier", "reason")),
    "kvtier:store_drops": ("Blocks that were not written to a tier", ("tier", "reason")),
    "kvtier:store_failures": ("Blocks whose write to a tier failed", ("tier", "reason")),
    "kvtier:hits_skipped_blocks": (
        "Blocks that were there, and were computed because loading would have taken longer",
        ("link",),
    ),
    "kvtier:probed_blocks": ("Blocks loaded to see whether a link is still slow", ("link",)),
    "kvtier:prefetched_blocks": (
        "Blocks brought from a tier into CPU memory while their request waited",
        ("tier",),
    ),
    "kvtier:prefetch_used_blocks": ("The part of these that a load took", ("tier",)),
    "kvtier:prefetch_wasted_blocks": ("The part of these that nobody used", ("tier",)),
    "kvtier:prefetch_cancelled_blocks": (
        "Blocks whose prefetch was given up before they had come",
        ("tier",),
    ),
    "kvtier:prefetch_saved_seconds": ("By how much prefetching made loads shorter, all in all", ()),
    "kvtier:warmed_blocks": ("Blocks brought into CPU memory after the start", ("tier",)),
    "kvtier:retain_refused_blocks": (
        "Blocks that were to be retained in a tier, and for which there was no place, or none any "
        "more",
        ("tier",),
    ),
    "kvtier:released_blocks": (
        "Blocks that a tier retained until their session was over",
        ("tier",),
    ),
    "kvtier:ignored_hints": ("Hints that are not known, or not as they should be", ("reason",)),
    "kvtier:missed_requests": (
        "Requests that found less than their prompts, by the reason of the first missing token",
        ("reason",),
    ),
    "kvtier:missed_tokens": ("The tokens that they computed for it", ("reason",)),
    "kvtier:failed_loads": ("Requests that were recomputed because a load failed", ()),
    "kvtier:late_loads": ("Loads that took longer than computing, and were not waited for", ()),
    _FIRST_TOKEN_TOKENS: (
        "Tokens of the prompts that kvtier:first_token_seconds counts",
        ("prompt",),
    ),
    "kvtier:copied_bytes": ("Bytes between the device and the CPU tier, all ranks", ()),
    "kvtier:direct_bytes": ("Bytes from files straight into the device, all ranks", ()),
    "kvtier:mover_restarts": ("Deaths of the mover's process", ()),
    "kvtier:mover_timeouts": ("Transfers that were given up", ()),
    "kvtier:internal_errors": ("Exceptions caught at the border to vLLM", ()),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "kvtier:blocks": ("Blocks that a tier holds", ("tier",)),
    "kvtier:bytes_used": ("Bytes in use of a tier's capacity", ("tier",)),
    "kvtier:bytes_capacity": ("A tier's capacity", ("tier",)),
    "kvtier:reading_blocks": ("Blocks being read", ("tier",)),
    "kvtier:write_budget_bytes_per_second": (
        "Bytes that may be written to a tier in the long run",
        ("tier",),
    ),
    "kvtier:write_budget_left_bytes": ("Bytes of that budget that may be written now", ("tier",)),
    "kvtier:write_budget_used_bytes": (
        "Bytes written to a tier since it has a budget, by all engines that share it",
        ("tier",),
    ),
    "kvtier:drive_written_bytes": ("What a tier's drive says was ever written to it", ("tier",)),
    _ENDURANCE: ("The part of its endurance that it has used", ("tier",)),
    "kvtier:retained_blocks": (
        "Blocks that a tier evicts last because somebody asked for it, once they are there",
        ("tier",),
    ),
    "kvtier:quarantined_blocks": ("Blocks whose place is not used again", ("tier",)),
    _DOWN: ("1 while a tier fails, or is left alone because it has", ("tier",)),
    "kvtier:link_bytes_per_second": ("Measured speed of the way from a tier", ("link",)),
    "kvtier:link_latency_seconds": ("Measured time that each load over a link takes", ("link",)),
    "kvtier:prefill_tokens_per_second": ("Measured speed of computing prompts", ()),
    "kvtier:queued_blocks": ("Blocks in the mover's hands", ()),
    "kvtier:prefetch_blocks_max": (
        "Blocks that may be prefetched until they are used: fewer, where many were not",
        (),
    ),
    "kvtier:waiting_blocks": ("Blocks that wait to be written to a tier", ("tier",)),
    "kvtier:catchup_backlog_blocks": (
        "Blocks that outlived a restart above a tier, still to be looked at or written to it",
        ("tier",),
    ),
}
# Of vLLM's own offloading, with the same meaning: who watches that sees kvtier in the same panels.
# What vLLM's connector itself counts (vllm:kv_offload_load_bytes and so on) it counts here, too.
_TIERING = "vllm:kv_offload_tiering"
_VLLM_COUNTERS = {
    f"{_TIERING}_read_bytes": "Total bytes read from a lower tier into the CPU tier",
    f"{_TIERING}_read_time": "Total time spent reading from a lower tier, in seconds",
    f"{_TIERING}_write_bytes": "Total bytes written to a lower tier",
    f"{_TIERING}_write_time": "Total time spent writing to a lower tier, in seconds",
    f"{_TIERING}_chunk_queries": "Chunks that a tier was asked for: none above it had them",
    f"{_TIERING}_chunk_hits": "The part of these that it had",
}
_USAGE = "vllm:kv_offload_cpu_cache"
_VLLM_GAUGES = {
    f"{_USAGE}_usage_perc": "Fraction of the CPU tier that active transfers hold",
    f"{_USAGE}_write_usage_perc": "Fraction of the CPU tier into which blocks are on their way",
    f"{_USAGE}_read_usage_perc": "Fraction of the CPU tier that is being read",
}
_ALLOCATION = "vllm:kv_offload_cpu_allocation_size"
_ALLOCATION_SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_UNTOLD_MAX = 10_000
_JOINED: dict[str, Callable[..., float]] = {_DOWN: max, _MISSES: min, _ENDURANCE: max}


def definitions(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """All of kvtier's metrics, in vLLM's words."""
    found: dict[str, Any] = {}
    for name, (text, labels) in _COUNTERS.items():
        found[name] = interfaces.OffloadingCounterMetadata(text, labels)
    for name, (text, labels) in _GAUGES.items():
        found[name] = interfaces.OffloadingGaugeMetadata(text, labels)
    for name, text in _VLLM_COUNTERS.items():
        found[name] = interfaces.OffloadingCounterMetadata(text, ("tier",))
    for name, text in _VLLM_GAUGES.items():
        found[name] = interfaces.OffloadingGaugeMetadata(text, ())
    found[_ALLOCATION] = interfaces.OffloadingHistogramMetadata(
        "Chunks that each request for room to store asks for", (), _ALLOCATION_SIZES
    )
    found[_TRANSFER] = interfaces.OffloadingHistogramMetadata(
        "Seconds from the queueing of a transfer to its end", ("source", "target"), _SECONDS
    )
    found[_FIRST_TOKEN] = interfaces.OffloadingHistogramMetadata(
        "Seconds from a request's arrival to its first token, by whether something of its prompt "
        "was loaded from a tier, the engine itself had some of it, or all was computed",
        ("prompt",),
        _SECONDS,
    )
    return found


def latest_gauges(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Metrics of which gauges say what was told last, whichever of several API servers was told.
    They would show what each has heard, however long ago."""
    return {**metric_types, Gauge: partial(metric_types[Gauge], multiprocess_mode="mostrecent")}


def _by_label(
    rows: Iterator[tuple[str, tuple[str, ...], float]],
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Tiers of one kind share their labels: their counts and sizes are added up, but one that is
    down is not hidden by another that is well, and what the next one had was not missed."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for name, labels, value in rows:
        join: Callable[..., float] = _JOINED.get(name, operator.add)
        known = found.get((name, labels))
        found[name, labels] = value if known is None else join(known, value)
    return found


def _written(
    budget: WriteStats, label: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Gauges of a tier with a write budget."""
    yield "kvtier:write_budget_bytes_per_second", label, budget.rate
    yield "kvtier:write_budget_left_bytes", label, budget.left
    yield "kvtier:write_budget_used_bytes", label, budget.written
    if budget.drive_written is not None and budget.drive_used is not None:
        yield "kvtier:drive_written_bytes", label, budget.drive_written
        yield _ENDURANCE, label, budget.drive_used


def _as_vllm_counts(found: ChainStats, index: int) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """What vLLM's tiering counts of a tier below the first."""
    label, read, written = (found.tiers[index].medium,), found.reads[index], found.writes[index]
    queries, missed = found.misses[index - 1], found.misses[index]
    values = (read.bytes, read.seconds, written.bytes, written.seconds, queries, queries - missed)
    for name, value in zip(_VLLM_COUNTERS, values, strict=True):
        yield name, label, value


def _usage(host: TierStats) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """How much of host memory is not at rest."""
    held = host.blocks + host.in_flight
    block = host.bytes_used / held / host.bytes_capacity if held and host.bytes_capacity else 0.0
    arriving, read = host.in_flight * block, host.pinned * block
    for name, value in zip(_VLLM_GAUGES, (arriving + read, arriving, read), strict=True):
        yield name, (), value


class Meter:
    """Reads the chain's counters twice a second, and when nothing else is left to do.

    Tells vLLM what has changed.
    """

    def __init__(self, manager: ChainManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._copied = self._direct = self._mistakes = 0
        self._allocations: deque[int] = deque(maxlen=_UNTOLD_MAX)
        self._next = 0.0
        self.due = True
        """Whether something has happened that nobody has been told yet."""

    def asked_for_room(self, chunks: int) -> None:
        """Room was asked for, to store so many."""
        self._allocations.append(chunks)

    def reported(self, report: Report) -> None:
        """Count what workers have copied."""
        self._copied += report.bytes_moved - report.bytes_read
        self._direct += report.bytes_read
        self.due = True

    def mistook(self, mistakes: int) -> None:
        """Count exceptions that workers have caught."""
        self._mistakes += mistakes
        self.due = True

    def tell_now(self) -> None:
        """The next step has to tell: no other may follow it for long."""
        self._next, self.due = 0.0, True

    def read(self) -> Any:
        """What has changed since the last answer; None if it is too soon to ask."""
        now = self._clock()
        if now < self._next and not (self.due and self._manager.idle):
            return None
        self._next = now + _EVERY_S
        # What is under way will be something to tell when it has ended.
        self.due = self._manager.has_pending_work
        stats = interfaces.OffloadingConnectorStats()
        chain = self._manager.chain
        found = chain.chain_stats()
        for (name, labels), value in _by_label(self._counters(found)).items():
            # One that is not there before it counts something has not grown for who watches it.
            told = self._told.get((name, labels))
            if told is None or value > told:
                self._told[name, labels] = value
                stats.increase_counter(name, value - (told or 0), labels)
        for (name, labels), value in _by_label(self._gauges(found)).items():
            if self._told.get((name, labels)) != value:
                self._told[name, labels] = value
                stats.set_gauge(name, value, labels)
        for sample in chain.take_samples():
            stats.observe_histogram(_TRANSFER, sample.seconds, (sample.source, sample.target))
        for chunks in self._allocations:
            stats.observe_histogram(_ALLOCATION, chunks)
        self._allocations.clear()
        for first in self._manager.load.first_tokens.take():
            stats.observe_histogram(_FIRST_TOKEN, first.seconds, (first.prompt,))
            stats.increase_counter(_FIRST_TOKEN_TOKENS, first.tokens, (first.prompt,))
        return None if stats.is_empty() else stats

    def _counters(self, found: ChainStats) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for index, tier in enumerate(found.tiers):
            label = (tier.medium,)
            yield "kvtier:hit_blocks", label, found.hits[index]
            yield "kvtier:hit_bytes", label, found.hit_bytes[index]
            yield _MISSES, label, found.misses[index]
            yield "kvtier:neighbour_loaded_blocks", label, tier.neighbour_loads
            yield "kvtier:stored_blocks", label, tier.stored
            yield "kvtier:evicted_blocks", label, tier.evicted
            yield "kvtier:retain_refused_blocks", label, tier.retain_refused
            yield "kvtier:released_blocks", label, tier.released
            yield "kvtier:corrupt_blocks", label, tier.corrupt
            yield "kvtier:dropped_blocks", label, tier.dropped
            ahead = found.prefetch
            yield "kvtier:prefetched_blocks", label, ahead.arrived[index]
            yield "kvtier:prefetch_used_blocks", label, ahead.used[index]
            yield "kvtier:prefetch_wasted_blocks", label, ahead.wasted[index]
            yield "kvtier:prefetch_cancelled_blocks", label, ahead.cancelled[index]
            yield "kvtier:warmed_blocks", label, ahead.warmed[index]
            for reason, count in found.failures[index].items():
                yield "kvtier:load_failures", (tier.medium, reason), count
            if index:
                yield from _as_vllm_counts(found, index)
        for link in found.links:
            yield "kvtier:written_bytes", (link.target,), link.bytes_written
            for reason, count in link.drops.items():
                yield "kvtier:store_drops", (link.target, reason), count
            for reason, count in link.failures.items():
                yield "kvtier:store_failures", (link.target, reason), count
        for name, costs in self._links().items():
            yield "kvtier:hits_skipped_blocks", (name,), costs.refused
            yield "kvtier:probed_blocks", (name,), costs.probed
        yield "kvtier:prefetch_saved_seconds", (), found.prefetch.saved_seconds
        for reason, count in self._manager.hints.ignored.items():
            yield "kvtier:ignored_hints", (reason,), count
        if self._manager.misses is not None:
            for why, (requests, tokens) in self._manager.misses.counts.items():
                yield "kvtier:missed_requests", (why.label,), requests
                yield "kvtier:missed_tokens", (why.label,), tokens
        yield "kvtier:failed_loads", (), self._manager.failed_loads
        yield "kvtier:late_loads", (), self._manager.late_loads
        yield "kvtier:copied_bytes", (), self._copied
        yield "kvtier:direct_bytes", (), self._direct
        yield "kvtier:mover_restarts", (), found.mover.restarts
        yield "kvtier:mover_timeouts", (), found.mover.timeouts
        self._mistakes += guard.untold()
        yield "kvtier:internal_errors", (), self._mistakes

    def _gauges(self, found: ChainStats) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for index, tier in enumerate(found.tiers):
            label = (tier.medium,)
            yield _DOWN, label, found.down[index]
            yield "kvtier:quarantined_blocks", label, tier.quarantined
            yield "kvtier:blocks", label, tier.blocks
            yield "kvtier:bytes_used", label, tier.bytes_used
            yield "kvtier:bytes_capacity", label, tier.bytes_capacity
            yield "kvtier:reading_blocks", label, tier.pinned
            yield "kvtier:retained_blocks", label, tier.retained
        yield from _usage(found.tiers[0])
        for tier, budget in zip(found.tiers, found.budgets, strict=False):
            if budget is not None:
                yield from _written(budget, (tier.medium,))
        for link in found.links:
            yield "kvtier:waiting_blocks", (link.target,), link.waiting
            yield "kvtier:catchup_backlog_blocks", (link.target,), link.behind
        yield "kvtier:prefetch_blocks_max", (), found.prefetch.blocks
        yield "kvtier:queued_blocks", (), found.mover.in_flight_blocks
        if self._manager.costs is not None:
            yield "kvtier:prefill_tokens_per_second", (), self._manager.costs.prefill_rate
        for name, costs in self._links().items():
            if costs.samples:
                yield "kvtier:link_bytes_per_second", (name,), costs.bandwidth
                yield "kvtier:link_latency_seconds", (name,), costs.latency

    def _links(self) -> Mapping[str, LinkCosts]:
        costs = self._manager.costs
        return {} if costs is None else costs.stats()
