"""Who writes: names that tell, on one machine, whether their process is still there."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from pathlib import Path

_open_here: set[str] = set()
"""Writers of this very process."""


def new() -> str:
    """Machine, process, when it began, and dice: eight hexadecimal digits each."""
    pid = os.getpid()
    writer = f"{_machine()}{pid:08x}{_start_of(pid) or '0' * 8}{secrets.token_hex(4)}"
    _open_here.add(writer)
    return writer


def this_process() -> str:
    """The writer that this process is as a whole."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(pid: int) -> str:  # a fork is another
    return new()


def ended(writer: str) -> None:
    """A writer of this process writes no more."""
    _open_here.discard(writer)


def may_live(writer: str) -> bool:
    """Whether a writer's process may still be there; of other machines nobody knows."""
    if writer[:8] != _machine():
        return True
    pid = int(writer[8:16], 16)
    if pid == os.getpid():
        return writer in _open_here
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return _start_of(pid) in (None, writer[16:24])


@functools.cache
def _machine() -> str:
    """This boot of this machine, as far as process numbers mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:  # some sandboxes do not say: then this process is known to itself alone
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot}{space}".encode(), digest_size=4).hexdigest()


def _start_of(pid: int) -> str | None:
    """When a process began, in ticks since boot; None if it cannot be seen."""
    try:
        # in bytes: a process may be called anything
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in b"ZX" else f"{int(fields[19]) & 0xFFFFFFFF:08x}"
