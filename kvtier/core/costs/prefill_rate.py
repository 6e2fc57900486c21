"""How long the engine takes to compute a prompt, learned from its steps.

A wrong estimate is found out only by computing. One that makes recomputing look dear is believed
for ever: what is loaded because of it is not computed. So doubt counts in favour of recomputing.
"""

from __future__ import annotations

from kvtier.core.costs.kept_rates import SECONDS_MAX, KeptPrefill
from kvtier.core.costs.link_rates import Line

_TELLING_TOKENS = 64
"""A step of fewer tokens tells nothing of prompts."""
_SURE_TOKENS = 512
"""A step of so many is mostly computing."""
_SHORT = 4
"""A step is not believed that is so many times shorter than the longest one, and than the longest
hit asked about."""
_DOUBT = 0.25
"""The share of what they take that is believed where nothing but short steps has been seen."""
_ASKED_KEPT = 0.98
"""By how much the longest hit asked about fades with each."""
_RECALLED_AT = (512, 8192)
"""The places in a prompt that stand for what an earlier run knew, and count as much as a step of
so few tokens."""
_RECALLED_TOKENS = 64.0


class Prefill:
    """Seconds a token, growing with the tokens before it."""

    def __init__(self) -> None:
        self._line = Line(ridge_slope=0.01)
        self._longest = 0
        """The longest step that the line rests on."""
        self._asked = 0.0
        """The longest hit asked about of late."""
        self._tried = 0
        """The longest hit that was to be recomputed since the line is what it is."""

    @property
    def known(self) -> bool:
        """Whether a step has been seen yet."""
        return bool(self._line.samples)

    def kept(self) -> KeptPrefill | None:
        """What the next run is told; None while nothing is known."""
        each, more = 1e3 * self._line.base, 1e6 * self._line.slope
        if not self.known or each <= 0:
            return None
        return KeptPrefill(min(each, SECONDS_MAX), min(more, SECONDS_MAX), max(1, self._longest))

    def recall(self, kept: KeptPrefill) -> None:
        """Begin with what an earlier run knew: as one short step, so that the first ones of this
        run count for more."""
        each, more = kept.seconds_per_ktoken / 1e3, kept.more_per_ktoken / 1e6
        self._line.recall(each, more, _RECALLED_AT, _RECALLED_TOKENS)
        self._longest = kept.longest

    def seconds(self, start: int, stop: int) -> float:
        """How long tokens `start:stop` take to compute."""
        return (stop - start) * self._line.at((start + stop) / 2)

    def observe(self, tokens: int, seconds: float, context: int) -> None:
        """A step computed so many tokens after so many others."""
        middle, each = context + tokens / 2, seconds / tokens
        if not self.known or each < self._line.at(middle) / 2:
            # So fast is no matter of overhead: what longer steps told before was wrong.
            self._longest, self._tried = tokens, 0
        elif tokens < max(
            min(self._longest, self._asked or self._longest) / _SHORT, _TELLING_TOKENS
        ):
            return
        self._longest = max(self._longest, tokens)
        self._line.observe(middle, each, weight=tokens)

    def doubt(self, tokens: int) -> float:
        """The share of `seconds` that a hit of so many tokens is held to take: less than all of it
        while only shorter steps have been seen, until such a hit was recomputed."""
        self._asked = max(self._asked * _ASKED_KEPT, tokens)
        unsure = max(self._longest, self._tried) < min(tokens, _SURE_TOKENS)
        return _DOUBT if unsure else 1.0

    def tried(self, tokens: int) -> None:
        """So many tokens of a hit are recomputed, which will show how long it takes."""
        self._tried = max(self._tried, tokens)
