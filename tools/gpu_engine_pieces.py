#!/usr/bin/env python3
"""Archives as pieces that can be carried one by one, and joined where nothing can be downloaded.

    python tools/gpu_engine_pieces.py missing .gpu-engine          # what is still to be carried
    python tools/gpu_engine_pieces.py unpack .gpu-engine SITE      # when all are there

A folder of pieces has a manifest, which goes with each of them: it names every archive and its
pieces by their SHA-256. A piece is named after its content, so one that is there already is the
same, and is not carried again. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib.metadata
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

PIECE_BYTES = 60 << 20
MANIFEST = "manifest.json"
UNPACKED = "unpacked.json"
_READ = 1 << 20


class PiecesError(Exception):
    """What is wrong with the pieces, and what to do."""


def say(text: str) -> None:
    print(f"[gpu-engine] {text}", flush=True)


def split(archive: Path, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[dict[str, Any]]:
    """Cut an archive into pieces in this folder; those that are there are left as they are."""
    pieces = []
    with archive.open("rb") as file:
        while data := file.read(piece_bytes):
            digest = hashlib.sha256(data).hexdigest()
            piece = folder / f"{digest[:32]}.piece"
            if not whole(piece, digest):
                making = piece.with_suffix(".making")
                making.write_bytes(data)
                making.replace(piece)
            pieces.append({"name": piece.name, "sha256": digest, "bytes": len(data)})
    return pieces


def write_manifest(folder: Path, archives: dict[str, dict[str, Any]]) -> None:
    """Say what there is, and remove pieces of no archive any more."""
    text = json.dumps(archives, indent=1) + "\n"
    making = folder / f"{MANIFEST}.making"
    making.write_text(text)
    making.replace(folder / MANIFEST)
    known = {piece["name"] for each in archives.values() for piece in each["pieces"]}
    for path in folder.glob("*.piece"):
        if path.name not in known:
            path.unlink()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise PiecesError(
            f"{folder / MANIFEST} is not there: `make gpu-engine-wheels` on a machine with a "
            "package index makes it; carry it here with the pieces"
        ) from None
    except ValueError as error:
        raise PiecesError(f"{folder / MANIFEST} cannot be read ({error}): carry it again") from None
    return manifest


def whole(piece: Path, digest: str) -> bool:
    """Whether a piece is there, and is what it should be."""
    try:
        with piece.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except FileNotFoundError:
        return False


def needed(manifest: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The archives of which this machine has not everything installed already."""
    return {
        name: each
        for name, each in manifest.items()
        if not each["installed"] or any(not has(*pair) for pair in each["installed"].items())
    }


def has(name: str, version: str) -> bool:
    """Whether a package is installed, and not of an older major version."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(found.partition(".")[0]) >= int(version.partition(".")[0])


def missing(folder: Path) -> list[str]:
    """The names of the pieces that this machine still needs; damaged ones are removed."""
    names = []
    for archive in needed(read_manifest(folder)).values():
        for piece in archive["pieces"]:
            if not whole(folder / piece["name"], piece["sha256"]):
                (folder / piece["name"]).unlink(missing_ok=True)
                names.append(piece["name"])
    return names


class Joined(io.RawIOBase):
    """The pieces of an archive as one file, read once from its beginning."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._file = path.open("rb")
            data = self._file.read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            self._file.close()
            self._file = None


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        if member.isfile() or member.isdir():
            yield member


def unpack(folder: Path, site: Path) -> bool:
    """Unpack what this machine needs into `site`, once; whether there was anything to do."""
    manifest = needed(read_manifest(folder))
    wanted = {
        name: [piece["sha256"] for piece in each["pieces"]] for name, each in manifest.items()
    }
    try:
        if json.loads((site / UNPACKED).read_text()) == wanted:
            return False
    except (OSError, ValueError):
        pass
    if lacking := missing(folder):
        count = sum(len(each["pieces"]) for each in manifest.values())
        raise PiecesError(
            f"{len(lacking)} of {count} pieces are still to be carried to {folder}: "
            + " ".join(lacking)
        )
    making = site.with_name(f"{site.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    for name, archive in manifest.items():
        say(f"unpacking {name}")
        pieces = [folder / piece["name"] for piece in archive["pieces"]]
        with (
            io.BufferedReader(Joined(pieces), _READ) as joined,
            tarfile.open(fileobj=joined, mode="r|xz") as tar,
        ):
            tar.extractall(making, members(tar), filter="data")
    compileall.compile_dir(making, quiet=2, workers=0)
    (making / UNPACKED).write_text(json.dumps(wanted))
    shutil.rmtree(site, ignore_errors=True)
    making.rename(site)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["missing", "unpack"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("site", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    try:
        if options.action == "missing":
            for name in missing(options.folder):
                print(name)
        else:
            unpack(options.folder, options.site or options.folder / "site")
    except PiecesError as error:
        print(f"[gpu-engine] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
