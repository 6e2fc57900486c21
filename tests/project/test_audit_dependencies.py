"""What is installed is what is pinned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from audit_dependencies import differences, pins, plain

PINNED = {"numpy": "2.1", "types-pyyaml": "6"}


def test_what_differs_is_said() -> None:
    assert differences(PINNED, PINNED | {"pip": "26"}) == []
    installed = {"numpy": "2.2", "types-pyyaml": "6", "odd": "1"}
    assert differences(PINNED, installed) == ["numpy 2.2: 2.1 is pinned"]
    assert differences(PINNED, {"numpy": "2.1"}) == [], "another Python may not need it"
    assert plain("types_PyYAML") == "types-pyyaml"


def test_pins_are_read_beside_markers_and_hashes() -> None:
    lock = (
        "PyYAML==6.0.3 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n"
        "cffi==2.1.1 ; os_name != 'nt' \\\n    --hash=sha256:22\n"
    )
    assert pins(lock) == {"pyyaml": "6.0.3", "cffi": "2.1.1"}
