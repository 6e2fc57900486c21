"""What a drive itself says was written to it, by nvme-cli's JSON: read only, and only where it can.

Without that program, without the right to ask, or on a disk of another kind, one line says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.errors import UNREADABLE
from kvtier.inspect.contents import DriveWear

_PROGRAM = "nvme"
_TIMEOUT_S = 5.0
_ANSWER_MAX = 1 << 16
_UNIT_BYTES = 512_000
"""The drive counts thousands of 512 bytes, whatever its sectors are."""
_COUNT_MAX = 1 << 64
_NAMESPACE = re.compile(r"nvme\d+(c\d+)?n\d+")
_DEPTH_MAX = 8


class _Answer(msgspec.Struct):
    data_units_written: int | str
    percent_used: int | str = 0


def drives_of(folder: Path, root: Path = Path("/")) -> list[str]:
    """The NVMe drives that a folder lies on: several, if they are joined to one file system."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for number in _device_numbers(folder, root):
            base = root / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
            if base.exists():
                found += _leaves(base.resolve(), _DEPTH_MAX)
                break
    return sorted(set(found))


def _device_numbers(folder: Path, root: Path) -> Iterator[int]:
    """Of the file system; some have numbers of their own, and say only by what they are mounted
    from which device holds them."""
    number = folder.stat().st_dev
    yield number
    mark = f"{os.major(number)}:{os.minor(number)}"
    for line in (root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
        words, _, rest = line.partition(" - ")
        if words.split()[2] == mark and len(rest.split()) > 1:
            source = Path(rest.split()[1])
            if source.is_absolute() and source.is_block_device():
                yield source.stat().st_rdev


def _leaves(block: Path, depth: int) -> Iterator[str]:
    """The drives below a block device: a partition's, and all of a RAID or a logical volume."""
    if (block / "partition").exists():
        block = block.parent
    below = list((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if below and depth:
        for each in below:
            yield from _leaves(each.resolve(), depth - 1)
    elif _NAMESPACE.fullmatch(block.name):
        yield block.name


def read_drives(folder: Path, root: Path = Path("/")) -> list[DriveWear]:
    """What the drives below a folder say, or why they do not."""
    names = drives_of(folder, root)
    if not names:
        return [DriveWear(device="", problem="the system names no NVMe drive below this folder")]
    program = shutil.which(_PROGRAM)
    if program is None:
        return [
            DriveWear(device=f"/dev/{name}", problem="nvme-cli is not installed") for name in names
        ]
    return [_ask(program, f"/dev/{name}") for name in names]


def _ask(program: str, device: str) -> DriveWear:
    command = [program, "smart-log", "--output-format=json", device]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return DriveWear(device=device, problem=_line(f"nvme smart-log: {error}"))
    if done.returncode:
        said = done.stderr or done.stdout
        reason = _line(said[:_ANSWER_MAX].decode(errors="replace")) or f"code {done.returncode}"
        return DriveWear(device=device, problem=f"nvme smart-log: {reason}")
    return parse(device, done.stdout)


def parse(device: str, text: bytes) -> DriveWear:
    """What nvme-cli has answered; its versions write large numbers as texts, too."""
    problem = "nvme smart-log says nothing that kvtier can read"
    if len(text) > _ANSWER_MAX:
        return DriveWear(device=device, problem=problem)
    try:
        answer = msgspec.json.decode(text, type=_Answer)
        units, percent = int(answer.data_units_written), int(answer.percent_used)
    except (*UNREADABLE, ValueError):
        return DriveWear(device=device, problem=problem)
    if not (0 <= units < _COUNT_MAX and 0 <= percent <= 255):
        return DriveWear(device=device, problem=problem)
    return DriveWear(device=device, written=units * _UNIT_BYTES, percent_used=percent)


def _line(text: str) -> str:
    """The first line, as a terminal may show it."""
    lines = text.strip().splitlines()
    first = lines[0][:200] if lines else ""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in first)
