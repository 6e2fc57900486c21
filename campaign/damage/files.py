"""What is done to whole files, tables and lists: as bytes, and as names in a folder."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from campaign.damage.specimens import Files, Specimen, kind_of

Damage = Callable[[random.Random, Specimen, Files, str], None]


def flip_bit(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    data = bytearray(files[path])
    if data:
        end = len(data) if dice.random() < 0.5 else min(len(data), 4096 + 64 * 16)
        data[dice.randrange(end)] ^= 1 << dice.randrange(8)
    files[path] = bytes(data)


def some_noise(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    data = bytearray(files[path])
    at = dice.randrange(len(data) + 1)
    noise = dice.randbytes(min(dice.choice((1, 4, 64, 512)), len(data) - at))
    data[at : at + len(noise)] = noise
    files[path] = bytes(data)


def cut_short(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    files[path] = files[path][: dice.randrange(len(files[path]) + 1)]


def emptied(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    files[path] = b""


def longer(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    files[path] += dice.randbytes(dice.choice((1, 63, 64, 4096, 12288)))


def zeroed(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    """A length that survived, and data that did not."""
    at = dice.randrange(len(files[path]) + 1) & ~511
    files[path] = files[path][:at] + bytes(len(files[path]) - at)


def of_before(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    """The file as it was earlier, or if it was not there, another of its kind."""
    same = [each for each in sorted(specimen.older) if kind_of(each) == kind_of(path)]
    if path in specimen.older or same:
        files[path] = specimen.older[path if path in specimen.older else dice.choice(same)]


def of_another_namespace(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    if path in specimen.foreign:
        files[path] = specimen.foreign[path]


def exchanged(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    """Two files change places, mostly of one kind."""
    same = [each for each in sorted(files) if kind_of(each) == kind_of(path)]
    other = dice.choice(same if dice.random() < 0.8 else sorted(files))
    files[path], files[other] = files[other], files[path]


def of_another_kind(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    files[path] = files[dice.choice(sorted(files))]


def gone(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    del files[path]


def entries_moved(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    """Two entries of 64 bytes of a table or list change places, or one is there twice."""
    data = bytearray(files[path])
    start = 4096 if path.endswith(".table") else 56
    count = min((len(data) - start) // 64, 24)
    if count < 2:
        return
    one, two = (start + 64 * dice.randrange(count) for _ in range(2))
    kept = bytes(data[one : one + 64])
    data[one : one + 64] = data[two : two + 64]
    if dice.random() < 0.7:
        data[two : two + 64] = kept
    files[path] = bytes(data)


def lie_in_table(dice: random.Random, specimen: Specimen, files: Files, path: str) -> None:
    """A field of a table's header is another, and the header's checksum is right again."""
    data = bytearray(files[path])
    if not path.endswith(".table") or len(data) < 4096:
        return
    at, form = dice.choice(((10, "<H"), (12, "<I"), (16, "<Q"), (24, "<Q"), (32, "<I")))
    value = dice.choice((0, 1, 5, 13, 4096, 12288, 16384, 1 << 24, (1 << 32) + 4096, 1 << 60))
    struct.pack_into(form, data, at, value & ((1 << 8 * struct.calcsize(form)) - 1))
    struct.pack_into("<Q", data, 52, xxhash.xxh3_64_intdigest(bytes(data[:52])))
    files[path] = bytes(data)


CONTENTS: tuple[Damage, ...] = (
    *(flip_bit, flip_bit, some_noise, cut_short, emptied, longer, zeroed, of_before),
    *(of_another_namespace, exchanged, of_another_kind, gone, entries_moved, lie_in_table),
)


def become_odd(dice: random.Random, folder: Path, paths: Sequence[str], outside: Path) -> str:
    """Something that is no file is where a file was: a folder, a link, a pipe."""
    target = folder / dice.choice(paths)
    target.unlink()
    what = dice.choice(("a folder", "a link", "a link to nothing", "a pipe"))
    if what == "a folder":
        target.mkdir()
    elif what == "a link":
        target.symlink_to(outside)
    elif what == "a link to nothing":
        target.symlink_to(outside.with_name("nothing"))
    else:
        os.mkfifo(target)
    return what
