"""How long loads over each link would take, from the links' rates and from what is queued there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvtier.core.costs.cost_settings import DEVICE_PRIOR, PAGEABLE_BANDWIDTH, Prior
from kvtier.core.costs.kept_rates import SECONDS_MAX, KeptLink
from kvtier.core.costs.link_rates import SIZES, DeviceRate, Line, LinkRate
from kvtier.core.costs.load_runs import DEVICE, PAGEABLE, Run

_GIB = 1 << 30


class LoadEstimates:
    """The rates of all links, and what loads over them would take."""

    def __init__(self, priors: Mapping[str, Prior], regain: float) -> None:
        self._priors = {DEVICE: DEVICE_PRIOR} | dict(priors)
        self._regain = regain
        prior = self._priors[DEVICE]
        self.device = DeviceRate(prior.latency, prior.bandwidth, PAGEABLE_BANDWIDTH)
        self.links: dict[str, LinkRate] = {DEVICE: self.device}
        self.limits: dict[str, float] = {}
        """How long a load over a link may take at most."""

    def link(self, name: str) -> LinkRate:
        """What is known of a link; assumed, as long as it has not been used."""
        link = self.links.get(name)
        if link is None:
            prior = self._priors.get(name) or Prior()
            link = self.links[name] = LinkRate(prior.latency, prior.bandwidth)
        return link

    def kept(self) -> dict[str, KeptLink]:
        """What the next run is told: of those links of which something is known."""
        lines = {name: link.line for name, link in self.links.items()}
        lines |= {DEVICE: self.device.lines[True], PAGEABLE: self.device.lines[False]}
        return {name: _kept(line) for name, line in lines.items() if line.samples}

    def recall(self, kept: Mapping[str, KeptLink], now: float, unprobed: float) -> None:
        """Begin with what an earlier run knew; no link is probed for so many seconds."""
        for name, each in kept.items():
            link = self.link(DEVICE if name == PAGEABLE else name)
            line = self.device.lines[False] if name == PAGEABLE else link.line
            line.recall(each.latency, each.seconds_per_gib / _GIB, SIZES)
            link.probed_at, link.next_probe = now, now + unprobed

    def terms(self, name: str, now: float) -> tuple[float, float]:
        """A link's terms, worse than they are while it has to win back what it lost."""
        link = self.link(name)
        fixed, each = link.terms(now)
        if link.refusing:
            return fixed / self._regain, each / self._regain
        return fixed, each

    def slowest(self, loads: Sequence[Run], now: float) -> tuple[float, str]:
        """How long these loads take, and the link that they wait for in the end."""
        fixed, each = self.terms(DEVICE, now)
        slowest = (fixed + each * sum(run.bytes for run in loads), DEVICE)
        for link, _, size in [run for run in loads if run.link != DEVICE]:
            fixed, each = self.terms(link, now)
            seconds = fixed + each * size
            late = seconds > self.limits.get(link, math.inf)
            slowest = max(slowest, (math.inf if late else seconds, link))
        return slowest


def _kept(line: Line) -> KeptLink:
    return KeptLink(min(line.base, SECONDS_MAX), min(line.slope * _GIB, SECONDS_MAX))
