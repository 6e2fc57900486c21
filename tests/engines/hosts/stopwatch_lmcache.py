"""The stop-watch's host for LMCache's connector, which brings numba into the engine's process.

vLLM 0.32 looks through the names of all modules there for kernels to replace. It fails at the one
of llvmlite, whose library takes any attribute, `__dict__` too, for one of its functions.
"""

from __future__ import annotations

from typing import Any

from host import main
from llvmlite.binding import ffi
from stopwatch import TimedHost

STEPS = 10


def hide_special_names(library: type) -> None:
    """Have it answer for its functions alone."""
    find = library.__getattr__  # type: ignore[attr-defined]

    def found(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = found  # type: ignore[attr-defined]


class LMCacheHost(TimedHost):
    """Its connector does not say what is under way: the benchmark looks at its files."""

    def settle(self) -> bool:
        for _ in range(STEPS):
            self._step()
        return True


if __name__ == "__main__":
    hide_special_names(type(ffi.lib))
    main(LMCacheHost)
