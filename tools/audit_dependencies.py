"""Whether what is installed here is as requirements.lock pins it: no network is asked.

Packages that are not pinned, or pinned for another Python, are no fault.

For known holes, with network: `pip-audit -r requirements.lock --no-deps --disable-pip`.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def plain(name: str) -> str:
    """A package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> dict[str, str]:
    """The version of each package in a lock's text, by its plain name."""
    found = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    return {plain(name): version for name, version in found}


def differences(pinned: dict[str, str], installed: dict[str, str]) -> list[str]:
    """What is not as it is pinned, a sentence each."""
    return [
        f"{name} {installed[name]}: {version} is pinned"
        for name, version in sorted(pinned.items())
        if installed.get(name, version) != version
    ]


def main() -> int:
    """1 if anything differs."""
    pinned = pins(Path(__file__).parents[1].joinpath("requirements.lock").read_text())
    installed = {plain(each.metadata["Name"]): each.version for each in distributions()}
    found = differences(pinned, installed)
    for each in found:
        print(each)
    if found:
        print("make venv installs what is pinned, make lock pins anew what is newest")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
