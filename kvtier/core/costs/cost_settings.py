"""What the cost model assumes of a link until it is used, and how bold it is."""

from __future__ import annotations

import msgspec


class Prior(msgspec.Struct, frozen=True):
    """What is assumed of a link until it has been used: better rather too good than too bad."""

    latency: float = 0.001
    bandwidth: float = 2e9


DEVICE_PRIOR = Prior(latency=20e-6, bandwidth=25e9)


PAGEABLE_BANDWIDTH = 8e9
"""What is assumed of memory that is not pinned."""


class CostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How bold the model is; the defaults suit every medium that was measured."""

    regain: float = 0.8
    """A link that was refused is taken again when it costs at most this share of recomputing."""
    probe_seconds: float = 5.0
    """The shortest time between two probes of a refused link."""
    probe_seconds_max: float = 300.0
    """The longest: the floor of probes by which a link that recovered is found out."""
    probe_share: float = 0.02
    """At most this share of time is spent on probes that are expected to lose."""
    probe_size: float = 0.25
    """A probe may take this share of recomputing, and more only where it would not tell enough."""
    probe_loss: float = 0.08
    """A probe of a link that is as it was expected to be may make a request this share slower than
    recomputing. If it would tell nothing then, it waits for a longer hit, so many seconds after the
    last probe, or after the start."""
    probe_patience: float = 60.0
    sure: float = 2.0
    """Blocks in host memory that are moved so many times as fast as computed are always loaded."""
    crowd_max: float = 8.0
    """A load that spares those who wait behind may take at most so many times as long as
    recomputing."""
