"""How much of each tier is kept for those who ask for it, and for how long."""

from __future__ import annotations

import msgspec

from kvtier.core.settings.prefetch_settings import Share
from kvtier.core.settings.values import Duration


class RetainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept because a request, a hint or `kvtier pin` asked for it."""

    share: Share = 0.25
    """The most of each tier that retained blocks may take, and 65,536 blocks at most; beyond it
    requests to retain are refused. 0 turns this off."""
    longest: Duration = Duration(3600.0)
    """Nothing is retained for longer than this after the last request for it, whatever that said;
    and so long, if it said nothing. What is pinned by `kvtier pin` stays."""
