"""What a folder is on is known, whatever it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.system.disk import mounted


@pytest.mark.parametrize("name", [b"with a blank", "données\u00a0".encode(), b"no\xfftext"])
def test_a_file_system_is_known_whatever_its_folder_is_called(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    written = os.fsencode(folder).replace(b" ", b"\\040")  # as the kernel does it
    listed = tmp_path / "proc/self/mounts"
    assert mounted(tmp_path, tmp_path) == ("unknown", [""])
    listed.parent.mkdir(parents=True)
    listed.write_bytes(b"/dev/a / ext4 rw 0 0\n/dev/b %s nfs4 rw,huge=never 0 0\n" % written)
    assert mounted(tmp_path, tmp_path) == ("ext4", ["rw"])
    assert mounted(folder / "below", tmp_path) == ("nfs4", ["rw", "huge=never"])
