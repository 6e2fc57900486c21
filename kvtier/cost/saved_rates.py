"""Rates kept from one run to the next: a small file for each machine, device, model and stack.

Nothing here holds up an engine: its start waits two seconds at most for the file to be read, and a
thread writes it. Engines that share a file overwrite each other's: all of them say the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as LateError
from pathlib import Path

import msgspec

from kvtier.cost.model import CostModel
from kvtier.cost.rates import BYTES_MAX, Owner, Rates, SavedRates, decode, encode
from kvtier.system.calls import abandonable

logger = logging.getLogger(__name__)

SUFFIX = ".json"
FILES_MAX = 256
"""The oldest beyond are removed: machines that are thrown away leave theirs behind."""
WRITE_EVERY_S = 10.0
READ_S = 2.0
CLOSE_S = 1.0
_MAKING = "making-"
_ABANDONED_S = 3600.0


def read_rates(path: Path) -> SavedRates:
    """What a file says; raises OSError, or ValueError on what kvtier did not write."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("no ordinary file")
        if about.st_uid not in (os.geteuid(), 0):
            raise ValueError("another user's file")
        return decode(file.read(BYTES_MAX + 1))


def rates_in(folder: Path) -> Iterator[SavedRates]:
    """All that can be read in a folder."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(f"*{SUFFIX}"))[: 2 * FILES_MAX]:
            with contextlib.suppress(OSError, ValueError):
                yield read_rates(path)


class RatesFile:
    """The file of one owner."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.folder = folder
        self.owner = owner
        digest = hashlib.sha256(msgspec.json.encode(owner)).hexdigest()[:32]
        self.path = folder / f"{digest}{SUFFIX}"

    def read(self) -> SavedRates:
        """What an earlier run has written; raises OSError, or ValueError on anything else."""
        kept = read_rates(self.path)
        if kept.owner != self.owner:
            raise ValueError("of another machine, device, model or stack")
        return kept

    def write(self, rates: Rates) -> None:
        """Replace it as a whole; raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=self.folder, prefix=_MAKING)  # 0600
        making = Path(name)
        try:
            with open(fd, "wb") as file:
                file.write(encode(self.owner, rates))
            making.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                making.unlink()
            raise

    def tidy(self) -> None:
        """Remove the oldest files if there are many, and what killed processes were writing."""
        now, found = time.time(), []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                changed = path.lstat().st_mtime
                if path.name.startswith(_MAKING) and now - changed > _ABANDONED_S:
                    path.unlink()
                elif path.suffix == SUFFIX:
                    found.append((changed, path))
        for _, path in sorted(found)[:-FILES_MAX]:
            with contextlib.suppress(OSError):
                path.unlink()


class RateKeeper:
    """Tells a cost model what an earlier run has learned, and keeps what it learns."""

    def __init__(
        self, file: RatesFile, costs: CostModel, *, write_every: float = WRITE_EVERY_S
    ) -> None:
        self._file = file
        self._costs = costs
        self._write_every = write_every
        self._written = Rates()
        self._tidied = self._failed = False
        self._stop = threading.Event()
        self._recall()
        self._thread = threading.Thread(target=self._write, name="kvtier-rates", daemon=True)
        self._thread.start()

    def _recall(self) -> None:
        try:
            kept = abandonable(self._file.read, "kvtier-rates").result(READ_S)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LateError) as error:
            reason = str(error) or f"it takes longer than {READ_S:.0f} s"
            logger.warning(
                "the rates of earlier runs are not known: %s: %s", self._file.path, reason
            )
            return
        self._costs.recall(kept.rates)
        self._written = kept.rates
        logger.info("the cost model begins with the rates of an earlier run (%s)", self._file.path)

    def _write(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(self._write_every)
            rates = self._costs.latest
            if rates in (Rates(), self._written):
                continue
            try:
                self._file.write(rates)
                self._written = rates
                if not self._tidied:
                    self._tidied = True
                    self._file.tidy()
            except OSError as error:
                if (
                    not self._failed
                ):  # once: the next start will have to learn anew, and that is all
                    logger.warning("rates cannot be kept for the next start: %s", error)
                self._failed = True

    def close(self) -> None:
        """Write what is known by now, unless its disk hangs. Call it from the model's thread."""
        self._costs.publish()
        self._stop.set()
        self._thread.join(CLOSE_S)
