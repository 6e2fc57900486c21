"""How much of a folder's write budget an engine holds: taken ahead of need by its keeper.

A lease is small beside what comes in, and what is not used is given back. Of what a process that
is killed held, nobody knows whether it was written: that counts as written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from kvtier.backends.nvme.wear.drive_counters import read_drives
from kvtier.backends.nvme.wear.write_ledger import WriteLedger
from kvtier.core.wear.allowance import WriteAllowance
from kvtier.system.calls import abandonable

_EVERY_S = 1.0
_PAUSE_S = 0.1
"""Who runs short is served sooner, but no sooner than this."""
_LOOK_S = 5.0
"""Who writes nothing looks so often what is left, because it fills."""
_FIRST_ASK_S, _ASK_DRIVES_S = 10.0, 600.0
_AHEAD_BLOCKS = 8
_AHEAD_S = 10.0
"""At least so many blocks, unless so many seconds do not bring them: of small budgets one block."""
_TOO_MUCH = 4.0


class Leases:
    """Keeps an engine's allowance supplied; for its keeper's thread."""

    def __init__(
        self,
        ledger: WriteLedger,
        allowance: WriteAllowance,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._allowance = allowance
        self._clock = clock
        self._told = 0.0
        self._next = self._next_look = self._not_before = 0.0
        self._next_ask: float | None = None

    @property
    def _ahead(self) -> float:
        """What is held at least."""
        block = self._allowance.block_bytes
        return max(block, min(_AHEAD_BLOCKS * block, _AHEAD_S * self._allowance.rate))

    def renew(self, *, at_once: bool = False) -> None:
        """Take, or give back, what is due. Raises OSError, or FolderBusy."""
        now, allowance = self._clock(), self._allowance
        if not at_once and now < self._not_before:
            return
        wanted = allowance.take_wanted()
        if not (at_once or wanted or now >= self._next):
            return
        self._next, self._not_before = now + _EVERY_S, now + _PAUSE_S
        total, lease = allowance.spent, allowance.lease
        spent = total - self._told
        target = max(self._ahead, 2 * spent, wanted)
        if lease > _TOO_MUCH * target:
            self._exchange(total, target - lease, now)
        elif at_once or spent or (lease < target and allowance.shared > 0):
            self._exchange(total, max(0.0, target - max(0.0, lease)), now)
        elif now >= self._next_look:
            self._look(now)

    def _exchange(self, total: float, change: float, now: float) -> None:
        allowance = self._allowance
        spent, owed = total - self._told, max(0.0, -allowance.lease)
        granted, entry = self._ledger.exchange(spent, change, owed)
        self._told = total
        allowance.grant(granted + owed)
        allowance.tell(max(0.0, entry.level), entry.written, total)
        self._next_look = now + _LOOK_S

    def _look(self, now: float) -> None:
        entry = self._ledger.look()
        if entry is not None:
            self._allowance.tell(max(0.0, entry.level), entry.written, self._told)
        self._next_look = now + _LOOK_S

    def ask_drives(self) -> None:
        """Have the drives asked now and then what they count, by a thread that may take its time.
        Not at the start: a process that runs for moments only asks nobody."""
        now = self._clock()
        if self._next_ask is None:
            self._next_ask = now + _FIRST_ASK_S
        elif now >= self._next_ask:
            self._next_ask = now + _ASK_DRIVES_S
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                abandonable(self._ask_drives, "kvtier-drives")

    def _ask_drives(self) -> None:
        drives = read_drives(self._ledger.root)
        written = [drive.written for drive in drives if drive.written is not None]
        if written and len(written) == len(drives):
            used = max(drive.percent_used or 0 for drive in drives) / 100
            self._allowance.tell_drive(float(sum(written)), used)

    def close(self) -> None:
        """Give back what is left. Raises OSError, or FolderBusy."""
        total, lease = self._allowance.spent, self._allowance.lease
        self._exchange(total, min(0.0, -lease), self._clock())
