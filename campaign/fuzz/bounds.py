"""What no input may do to the process that reads it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

SECONDS_MAX = 1.0
"""Of the thread's own time: the machine may be busy with something else."""
KIB_MAX = 64 << 10
Typed = tuple[type[BaseException], ...]
_TOUCHING = frozenset(
    {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}
    | {"os.truncate", "os.chmod", "os.listdir", "os.scandir", "subprocess.Popen", "os.system"}
    | {"socket.connect", "os.exec", "os.posix_spawn", "os.fork"}
)


class TooMuch(AssertionError):
    """An input took too long, too much memory, or touched what it must not."""


class Bounds:
    """Watches calls, one at a time, in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._watching = False
        self._touched = ""
        sys.addaudithook(self._heard)

    def begin(self) -> None:
        """Forget what took much memory before: the kernel tells of the most that there was."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def call(self, parse: Callable[[bytes], None], data: bytes, typed: Typed) -> bool:
        """Parse an input: whether it was taken. Raises TooMuch, and what is not typed."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.thread_time()
        self._touched, self._watching = "", True
        taken = True
        try:
            parse(data)
        except typed:
            taken = False
        finally:
            self._watching = False
        seconds = time.thread_time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if seconds > SECONDS_MAX:
            raise TooMuch(f"it took {seconds:.1f} s")
        if grown > KIB_MAX:
            raise TooMuch(f"it took {grown >> 10} MiB")
        if self._touched:
            raise TooMuch(f"it touched {self._touched}")
        return taken

    def _heard(self, event: str, args: tuple[object, ...]) -> None:
        if not self._watching or event not in _TOUCHING:
            return
        path = args[0] if args else ""
        if event in ("open", "os.truncate") and not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is open already
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else event
        if text.startswith("/proc/self/fd/"):  # a name in a folder that is open
            text = str(Path(text).parent.resolve())
        mine = text.startswith((self._folder, sys.prefix, sys.base_prefix))
        mine = mine or (bool(text.strip(".")) and "/" not in text)  # likewise
        if not mine and not text.endswith((".py", ".pyc")):  # an import, at a first use
            self._touched = f"{event} {text}"
