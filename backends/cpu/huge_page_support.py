"""Huge pages for a region: fewer entries for the processor to keep, and for a GPU to pin.

On a tmpfs its mount option decides, not the system's setting for other shared memory. Where that
says `advise`, huge pages come only to a mapping that asks for them before there is any memory: what
`fallocate` takes comes in small ones, and stays so.
"""

from __future__ import annotations

from pathlib import Path

from kvtier.system.disk import mounted

_SWITCH = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def why_none(folder: Path, root: Path = Path("/")) -> str | None:
    """Why a region in this folder gets no huge pages; None if it may get some."""
    try:
        switch = (root / _SWITCH).read_text()
    except OSError:
        return "this kernel knows none for shared memory"
    if "[force]" in switch:
        return None
    if "[deny]" in switch:
        return f"/{_SWITCH} is deny: set it to never or advise"
    kind, options = mounted(folder, root)
    if kind != "tmpfs":
        return f"{folder} is not on a tmpfs"
    given = {option.removeprefix("huge=") for option in options if option.startswith("huge=")}
    if given <= {"never"}:
        return f"mount its tmpfs with huge=advise (mount -o remount,huge=advise {folder})"
    return None
