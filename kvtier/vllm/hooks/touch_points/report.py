"""What is as_lines of a vLLM's touch-points: to people, and to programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvtier.vllm.hooks.touch_points.source_check import Finding


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each that is there, and of each that has moved what a port has to look at."""
    for finding in findings:
        point = finding.point
        if not finding.moved:
            yield f"ok    {point.target} ({point.used_by})"
            continue
        yield f"BAD   {point.target} (kvtier/vllm/hooks/{point.used_by})"
        yield from (f"      - {each}" for each in finding.moved)
        yield f"      why: {point.why}"
        yield f"      without it: {point.without_it}"
        if point.upstream:
            yield f"      upstream: {point.upstream}"
    moved = sum(bool(finding.moved) for finding in findings)
    yield f"{len(findings) - moved} of {len(findings)} touch-points are there as expected"


def as_data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The same, for JSON."""
    return [
        {
            "target": finding.point.target,
            "members": finding.point.members,
            "used_by": finding.point.used_by,
            "why": finding.point.why,
            "without_it": finding.point.without_it,
            "upstream": finding.point.upstream,
            "moved": finding.moved,
        }
        for finding in findings
    ]
