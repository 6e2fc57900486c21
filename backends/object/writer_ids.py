"""Ids of writers. On the same machine they show whether the writer's process is still there."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from pathlib import Path

_open_here: set[str] = set()
"""Writers of this process that may still write."""


def new_writer_id() -> str:
    """Machine, process, start of the process, random: eight hexadecimal digits each."""
    pid = os.getpid()
    writer = f"{_machine()}{pid:08x}{_start_of(pid) or '0' * 8}{secrets.token_hex(4)}"
    _open_here.add(writer)
    return writer


def process_writer_id() -> str:
    """The id of this process as a whole."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(pid: int) -> str:  # a fork has another pid
    return new_writer_id()


def mark_ended(writer: str) -> None:
    """This writer of this process writes no more."""
    _open_here.discard(writer)


def may_live(writer: str) -> bool:
    """Whether a writer's process may still be there. Of other machines that is not known."""
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
    """This boot of this machine, and its namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:  # in some sandboxes: then no other process can be recognised
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot}{space}".encode(), digest_size=4).hexdigest()


def _start_of(pid: int) -> str | None:
    """When a process began, in ticks since boot; None if it cannot be seen."""
    try:
        # in bytes: the name of a process may be anything
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in b"ZX" else f"{int(fields[19]) & 0xFFFFFFFF:08x}"
