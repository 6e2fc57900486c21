"""Several engines on one folder and one store, whose clocks disagree and jump by hours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

from campaign.children import Say
from campaign.scenarios.shared import Shared, serve

_JUMP_EVERY_S = 0.7
_HOURS = 12.0


class Clocks(Shared):
    name = "clocks"
    about = (
        "As `shared`, and the clock of each engine is wrong: by up to twelve hours either way, and "
        f"by others every {_JUMP_EVERY_S} s, while those of its files and of the commands are "
        "right. Budgets hold at every look, and nothing wrong is served; a block may leave sooner "
        "or later than its turn."
    )

    def _serve(self, say: Say, config: dict[str, Any], seed: int) -> None:
        with _jumping(seed):
            serve(say, config, seed)


@contextmanager
def _jumping(seed: int) -> Iterator[None]:
    """Have the wall clock off by something else every now and then."""
    now_ns, offs = time.time_ns, dict[int, int]()

    def wrong_ns() -> int:
        spell = int(time.monotonic() / _JUMP_EVERY_S)
        if spell not in offs:
            hours = Random(f"{seed} {spell}").uniform(-_HOURS, _HOURS)
            offs[spell] = int(hours * 3600e9)
        return now_ns() + offs[spell]

    def wrong() -> float:
        return wrong_ns() / 1e9

    with mock.patch.object(time, "time", wrong), mock.patch.object(time, "time_ns", wrong_ns):
        yield
