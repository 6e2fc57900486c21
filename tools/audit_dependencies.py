"""Whether this environment has what constraints.txt says, and nothing else: no network is asked.

For known holes, with network: `pip-audit -r constraints.txt --no-deps --disable-pip`.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

_TOOLS = {"pip", "setuptools", "kvtier"}


def plain(name: str) -> str:
    """A package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(pinned: dict[str, str], installed: dict[str, str]) -> list[str]:
    """What is not as it is pinned, a sentence each."""
    found = [
        f"{name} {installed.get(name, 'is missing')}: {version} is pinned"
        for name, version in sorted(pinned.items())
        if installed.get(name) != version
    ]
    more = sorted(installed.keys() - pinned.keys() - _TOOLS)
    return found + [f"{name} {installed[name]}: nobody has asked for it" for name in more]


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
