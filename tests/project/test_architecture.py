"""ARCHITECTURE.md is true: every file, and every name in it, exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "ARCHITECTURE.md", *ROOT.glob("CONTRIBUTING.md")]
_PLACE = re.compile(
    r"`((?:kvtier|backends|tests|examples|configs|docs|tools)/[\w./-]*)(?:: ([\w.]+))?`"
)


def names_in(path: Path) -> set[str]:
    """The functions, classes and methods that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    places = _PLACE.findall(page.read_text(encoding="utf-8"))
    assert len(places) > 10
    for path, name in places:
        assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"
        assert not name or name in names_in(ROOT / path), f"{page.name}: {path} has no {name}"
