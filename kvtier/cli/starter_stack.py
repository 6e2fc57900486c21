"""A commented stack file for this machine: how much memory and disk it suggests, and why."""

from __future__ import annotations

import json
from pathlib import Path

from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.backends.object.stores.open_store import parse_url
from kvtier.settings import ByteSize
from kvtier.system.disk import Disk
from kvtier.system.memory import memory_given

_SHARED_MEMORY = Path("/dev/shm")
_GIB = 1 << 30
_MIB = 1 << 20


def starter(
    folder: Path,
    *,
    name: str | None,
    memory: str | None,
    disk: str | None,
    bucket: str | None,
) -> str:
    """The text of a stack file with a CPU tier, an NVMe tier in this folder, and a bucket if one
    is named; sizes that are not given follow the machine."""
    folder = folder.expanduser().absolute()
    total, free = memory_given(), Disk().free_bytes(_nearest(folder))
    shared = Disk().free_bytes(_SHARED_MEMORY)
    text = _TEMPLATE.format(
        name='"${KVTIER_NAME:-default}"' if name is None else _quoted(name),
        memory=_round(total),
        shared=_round(shared),
        free=_round(free),
        cpu=memory or _round(min(total // 4, shared * 4 // 5)),
        nvme=disk or _round(free * 4 // 5),
        folder=_quoted(str(folder)),
    )
    return text if bucket is None else text + _BUCKET.format(url=_quoted(bucket))


def bucket_folder(url: str) -> Path | None:
    """The folder that the url of a third tier names, None for a bucket; raises ValueError for one
    that names neither, with what to write."""
    try:
        return parse_url(url).folder
    except WrongEndpoint as error:
        raise ValueError(str(error)) from error


def _quoted(text: str) -> str:
    """As a YAML string in which nothing is taken from the environment."""
    return json.dumps(text, ensure_ascii=False).replace("${", "$${")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _round(size: int) -> ByteSize:
    """Down to whole GiB, or MiB if it is less than a few of them."""
    unit = _GIB if size >= 4 * _GIB else _MIB
    return ByteSize(max(size // unit, 1) * unit)


_TEMPLATE = """\
# yaml-language-server: $schema=./schema.json
# The line above lets editors complete and check: kvtier config schema > schema.json
# All settings, with what they mean: kvtier config reference

version: 1

# Names this engine. Give each engine of one machine a name of its own, here or by the environment.
name: {name}

# How many tokens one stored block covers: a multiple of the engine's own block size.
chunk_tokens: 256

# Tiers are asked in this order. Each takes what the one before it lets go or passes on.
tiers:
  # Shared memory. This machine has {memory} of memory, and {shared} are free in /dev/shm.
  - kind: cpu
    capacity: {cpu}

  # A folder on a local disk, {free} of which are free. Several engines may share it.
  - kind: nvme
    path: {folder}
    capacity: {nvme}
    # write: on_evict          # only what the tier above lets go, which spares the disk
    # admission: second_touch  # only what was used a second time, which spares it more
"""

_BUCKET = """
  # A bucket, or a folder, that many servers share; the capacity is that of all together.
  # Credentials come from the environment, a profile or a role.
  - kind: object
    url: {url}
    capacity: 1TiB
"""
