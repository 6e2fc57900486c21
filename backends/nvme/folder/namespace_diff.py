"""Why a model is not found in a folder that holds it: under which other facts it was stored.

After an upgrade or with another flag everything misses at first. That is right, and yet the first
thing that somebody asks who looks at the hits.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from kvtier.backends.nvme.folder.files import homes, length
from kvtier.types import NAMESPACE_BYTES_MAX, Namespace

_HOMES_MAX = 256


def differs_in(root: Path, namespace: Namespace) -> str:
    """The facts in which what a folder holds of the same model differs, and of that what changed
    last; nothing if there is none."""
    found: list[tuple[float, Namespace]] = []
    with contextlib.suppress(OSError):
        for home in homes(root)[:_HOMES_MAX]:
            other = _described(home / "namespace.json")
            if other is None or home.name == namespace.id:
                continue
            if other.model and other.model == namespace.model:
                found.append((home.stat().st_mtime, other))
    if not found:
        return ""
    latest = max(found, key=lambda pair: pair[0])[1]
    said = "; ".join(str(each) for each in namespace.differences(latest))
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in said)


def _described(path: Path) -> Namespace | None:
    with contextlib.suppress(OSError, msgspec.ValidationError):
        if path.is_file() and length(path) <= NAMESPACE_BYTES_MAX:
            return Namespace.from_json(path.read_bytes())
    return None
