"""Whether what is installed here is as constraints.txt pins it: no network is asked.

Packages that are not pinned, or pinned for another Python, are no fault.

For known holes, with network: `pip-audit -r constraints.txt --no-deps --disable-pip`.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def plain(name: str) -> str:
    """A package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(pinned: dict[str, str], installed: dict[str, str]) -> list[str]:
    """What is not as it is pinned, a sentence each."""
    return [
        f"{name} {installed[name]}: {version} is pinned"
        for name, version in sorted(pinned.items())
        if installed.get(name, version) != version
    ]


def main() -> int:
    """1 if anything differs."""
    lines = Path(__file__).parents[1].joinpath("constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    pinned = {plain(name): version for name, version in pairs}
    installed = {plain(each.metadata["Name"]): each.version for each in distributions()}
    found = differences(pinned, installed)
    for each in found:
        print(each)
    if found:
        print("make venv installs what is pinned, make lock pins anew what is newest")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
