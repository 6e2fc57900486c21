"""Shared memory that a killed test leaves is there for nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier.testing.subject import make_memory_folder


def test_a_dead_owners_folder_is_removed_and_a_living_ones_stays(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from kvtier.testing import subject as m; "
    code += "print(m.make_memory_folder('bench', Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.strip())
    (left / "region").write_bytes(b"1234")
    other = tmp_path / "kvtier-test-of-mine"
    other.mkdir()
    mine = make_memory_folder(parent=tmp_path)
    second = make_memory_folder(parent=tmp_path)
    assert set(tmp_path.iterdir()) == {mine, second, other}
    assert mine.stat().st_mode & 0o777 == 0o700
