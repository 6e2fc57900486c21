"""Packs a source distribution anew, so that the same files always make the same archive.

setuptools writes into the archive when it was built, in which order its folders list their files,
and by whom; a wheel it makes the same from the same files by itself.

    SOURCE_DATE_EPOCH=... python tools/reproducible_sdist.py dist/kvtier-0.1.0.tar.gz
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def pack_again(archive: bytes, epoch: int) -> bytes:
    """The same files by their names' order, all of that time, nobody's, and for all to read."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as before,
        gzip.GzipFile("", "wb", fileobj=packed, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda each: each.name):
            member.mtime, member.pax_headers = epoch, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            after.addfile(member, before.extractfile(member))
    return packed.getvalue()


def main() -> None:
    """Replace the archive that is named."""
    path = Path(sys.argv[1])
    path.write_bytes(pack_again(path.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))


if __name__ == "__main__":
    main()
