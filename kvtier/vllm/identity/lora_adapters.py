"""LoRA adapters that an engine uses: which bytes stand behind their names, by looks at their files.

A thread looks; the engine's threads read from memory what it has seen. Files may lie on a server
that hangs, and a scheduler must not wait for that.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.system.calls import Attempt
from kvtier.vllm.protocol import Report
from kvtier.weight_fingerprints import adapter_files, fingerprint_adapter

logger = logging.getLogger(__name__)

_LOOK_WAIT_S = 0.5
"""For so long a request waits in the engine's queue for a look at its adapter's files, and a store
that has ended before it counts."""
_ROUNDED_S = 2.0
"""File systems round the time of a change by as much."""


class _Look:
    """A look at an adapter's files that begins after somebody has asked for it."""

    def __init__(self, folder: Path, now: float) -> None:
        self.folder = folder
        self.asked, self.wall_time = now, time.time() - _ROUNDED_S
        self.ended = threading.Event()
        self.salt: bytes | None = None
        """Once it has ended: what stands in the keys for the adapter; None if nobody knows."""
        self.given_up = False


class _Stored(NamedTuple):
    """A report on a store, which counts if a look after it finds the files unchanged."""

    worker_job: int
    report: Report
    look: _Look


class Adapters:
    """What stands in the keys for the bytes of LoRA adapters, which vLLM's hashes leave out.

    A request waits in the engine's queue until a look that begins after its arrival has ended: the
    engine cannot have read the files for it before. When files have changed since the first look,
    or cannot be read, nobody knows which of them the engine has loaded: nothing is kept from then
    on, nor of what was being stored. So a store with an adapter counts only after another look. An
    adapter whose files are not to be seen is known in this process only, until the engine reads it
    again.

    Workers know adapters by numbers. One that is given to another adapter makes requests go on
    with that, if it is read in place of the first; else those that come get the first.
    """

    def __init__(
        self, look_wait_s: float = _LOOK_WAIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look_wait_s = look_wait_s
        self._clock = clock
        self._known: dict[Path, tuple[object, bytes | None]] = {}
        self._unseen = os.urandom(16)
        self._users: dict[str, Path] = {}
        self._arrivals: dict[str, tuple[_Look, Any]] = {}
        """Requests whose salt nobody has asked for yet."""
        self._storing: dict[int, Path] = {}
        self._stored: list[_Stored] = []
        self._numbers: dict[int, Path] = {}
        self._reads: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._next: dict[Path, _Look] = {}
        """Looks that have not begun: whoever asks for one meanwhile shares it."""
        self._queue: queue.SimpleQueue[_Look | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since = math.inf
        """When the look began that is under way."""
        self._read_unseen: dict[Path, float] = {}
        """Adapters that the engine may have read before the first look ended, and the wall time
        since which their files must not have changed."""

    # -- the engine's side -------------------------------------------------------------------

    def read(self, adapter: Any) -> None:
        """The engine reads it now, whenever it is used. Waits for the look as long as a request
        would: what the engine's own thread does next is to read the same files."""
        self._reads[adapter.lora_int_id] += 1
        self._number(adapter)
        look = self._look(Path(adapter.lora_path))
        if self._pending(look) and not look.ended.wait(self._look_wait_s):
            self._give_up_on(look)

    def removed(self, number: int) -> None:
        """The engine has let go of it: its number is free, unless requests have it yet."""
        if self._numbers.get(number) not in self._users.values():
            self._numbers.pop(number, None)

    def arrived(self, request: str, adapter: Any) -> None:
        """A request with this adapter was added, for which the engine may read it later."""
        folder = self._users[request] = Path(adapter.lora_path)
        self._number(adapter)
        self._arrivals[request] = self._look(folder), adapter

    def awaits(self, request: str) -> bool:
        """Whether its salt is not known yet, and will be soon."""
        arrival = self._arrivals.get(request)
        return arrival is not None and self._pending(arrival[0])

    def take_salt(self, request: str) -> bytes | None:
        """The salt for a request that does not wait any more; None if nothing is kept of it."""
        look, adapter = self._arrivals.pop(request)
        salt = self._found(look)
        if salt != self._unseen:
            return salt
        number = adapter.lora_int_id
        which = f" {number} {self._reads[number]}".encode()
        return None if adapter.load_inplace else salt + which

    def ended(self, request: str) -> None:
        """It stores nothing any more."""
        self._users.pop(request, None)
        self._arrivals.pop(request, None)

    def stores(self, request: str, worker_job: int) -> None:
        """Blocks of a request are about to be stored."""
        if request in self._users:
            self._storing[worker_job] = self._users[request]

    def holds(self, worker_job: int, report: Report) -> bool:
        """Whether what is said of a worker job counts later only (`take_stored`), because it stores
        blocks that were computed with an adapter."""
        folder = self._storing.pop(worker_job, None)
        if folder is not None:
            self._stored.append(_Stored(worker_job, report, self._look(folder)))
        return folder is not None

    def take_stored(self) -> list[tuple[int, Report, bool]]:
        """Reports that were held and count now, and whether the blocks were computed by the
        adapters in their keys: if one has changed between a request's coming and the end of its
        store, the engine may have read it in between."""
        if not self._stored:
            return []
        ended, waiting = list[_Stored](), list[_Stored]()
        for each in self._stored:
            (waiting if self._pending(each.look) else ended).append(each)
        self._stored = waiting
        return [
            (worker_job, report, self._found(look) is not None)
            for worker_job, report, look in ended
        ]

    def close(self) -> None:
        """Look at nothing any more."""
        self._queue.put(None)

    def _number(self, adapter: Any) -> None:
        number, folder = adapter.lora_int_id, Path(adapter.lora_path)
        before = self._numbers.get(number, folder)
        self._numbers[number] = folder
        if before != folder:
            for doubtful in [before] if adapter.load_inplace else [before, folder]:
                self._forget(doubtful, f"shares its number, {number}, with that in {folder}")

    def _forget(self, folder: Path, why: str) -> None:
        if self._known.get(folder, (None, b""))[1] is None:
            return  # and said so
        logger.warning(
            "the adapter in %s %s: nothing is kept for it until the engine is started again",
            folder,
            why,
        )
        self._known[folder] = (None, None)

    # -- looks -------------------------------------------------------------------------------

    def _look(self, folder: Path) -> _Look:
        """Have somebody look at an adapter's files from now on."""
        with self._lock:
            look = self._next.get(folder)
            if look is None:
                look = self._next[folder] = _Look(folder, self._clock())
                self._queue.put(look)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvtier-adapters", daemon=True)
                thread.start()
                self._thread = thread
        return look

    def _found(self, look: _Look) -> bytes | None:
        """The salt that a look has ended with, unless the adapter was forgotten since."""
        if not look.ended.is_set() or look.salt is None:
            return None
        return self._known[look.folder][1]

    def _pending(self, look: _Look) -> bool:
        """Whether a look has not ended, and is worth waiting for: while one hangs, none is."""
        if look.ended.is_set():
            return False
        if self._clock() - min(look.asked, self._busy_since) < self._look_wait_s:
            return True
        self._give_up_on(look)
        return False

    def _give_up_on(self, look: _Look) -> None:
        """The engine goes on, and may read the files before the look at them has ended."""
        if not look.given_up:
            look.given_up = True
            logger.warning(
                "the files of the adapter in %s take long to be looked at: nothing is kept of "
                "requests with adapters that come meanwhile",
                look.folder,
            )
        if look.folder not in self._known:
            self._read_unseen.setdefault(look.folder, look.wall_time)

    def _run(self) -> None:
        while (look := self._queue.get()) is not None:
            with self._lock:
                del self._next[look.folder]
            self._busy_since = self._clock()
            with Attempt(f"the adapter in {look.folder} cannot be looked at"):
                look.salt = self._salt_of(look.folder)
            if look.folder not in self._known:  # the engine reads it now, and nobody has seen what
                self._forget(look.folder, "cannot be looked at")
            self._busy_since = math.inf
            look.ended.set()

    def _salt_of(self, folder: Path) -> bytes | None:
        """What stands in the keys for this adapter; None if nothing is to be kept of it."""
        if folder in self._known and self._known[folder][1] is None:
            return None
        try:
            stamp = [(path, size, path.stat().st_mtime_ns) for path, size in adapter_files(folder)]
            if folder in self._known:
                changed = stamp != self._known[folder][0]
            else:
                salt = fingerprint_adapter(folder) if stamp else self._unseen
                changes = [path.stat().st_ctime for path, _, _ in stamp]
                changed = max(changes, default=0.0) >= self._read_unseen.get(folder, math.inf)
                if not changed:
                    self._known.setdefault(folder, (stamp, salt))  # unless forgotten meanwhile
        except OSError:
            changed = True
        if changed:
            self._forget(folder, "has changed, or cannot be read")
        return self._known[folder][1]
