"""What the memory of a new region is like: near which GPUs, in what pages, and there at once.

On a tmpfs the size of pages comes to a mapping that asks for it before there is any memory, and so
does the place: what `fallocate` takes comes as it comes, and stays so.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.record.record import Buffer
from kvtier.system import memory
from kvtier.system.memory import populate

logger = logging.getLogger(__name__)


class Memory:
    """Shapes a file that has none yet."""

    def __init__(self, path: Path, near: Sequence[int], *, huge_pages: bool, serving: bool) -> None:
        self._path = path
        self._near = near
        self._huge_pages = huge_pages
        self._serving = serving

    def shape(self, fd: int, size: int) -> None:
        """Choose, and take what is to be there at once. What this does not take is taken, or
        refused, by the allocation that must follow."""
        if not (self._near or self._huge_pages or self._serving):
            return
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as view:
            if self._near:
                self._place(view)
            if self._huge_pages:
                with contextlib.suppress(OSError):
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            if self._huge_pages or self._serving:
                topology = memory.Topology()
                cores = {core for node in self._near for core in topology.cores(node)}
                populate(view, f"taking memory for the CPU region {self._path}", cores)

    def _place(self, view: Buffer) -> None:
        """Choose the nodes that it will come from."""
        reason = memory.place(view, self._near)
        where = f"{memory.describe(self._near)}, beside the GPUs"
        if reason is None:
            logger.info("the CPU region %s lies on NUMA %s", self._path, where)
        else:
            logger.warning(
                "the CPU region %s cannot be put on NUMA %s: %s", self._path, where, reason
            )
