"""Which vLLM is served: the table of what is touched, and how it is looked for in sources."""

from __future__ import annotations

import ast
import io
import logging
import re
import zipfile
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.vllm.hooks import versions
from kvtier.vllm.hooks.touch_points import TOUCH_POINTS, TouchPoint
from kvtier.vllm.hooks.versions import Sources, TouchPointCheck, as_lines, check, wheel

HOOKS = Path(kvtier.__file__).parent / "vllm" / "hooks"
SOURCES = {
    "vllm/engine.py": """
from vllm.base import Above
class Engine(Above):
    fields: int = 0
    def __init__(self, config):
        self._requests, self.steps = {}, 0
    def step(self, tokens, *, ahead=False): ...
def start(config, role): ...
""",
    "vllm/base.py": """
from abc import abstractmethod
class Above:
    @abstractmethod
    def reset(self): ...
    @property
    def paused(self): ...
""",
    "vllm/door/__init__.py": "from vllm.engine import Engine as Core, start\n",
}


def point(target: str, *members: str, derived: bool = False) -> TouchPoint:
    return TouchPoint(target, " ".join(members), "x.py", "because", derived=derived)


@pytest.mark.parametrize(
    ("wanted", "moved"),
    [
        (point("vllm.engine:Engine", "fields", "_requests", "steps", "paused", "reset()"), []),
        (point("vllm.engine:Engine", "step(tokens)", "__init__(config)"), []),
        (point("vllm.door:Core", "step(tokens)"), []),
        (point("vllm.door", "start(config,role)", "Core"), []),
        (point("vllm.engine:Engine", "_jobs"), ["vllm.engine:Engine._jobs is not there"]),
        (point("vllm.engine:Gone", "step"), ["vllm.engine:Gone is not there"]),
        (point("vllm.gone:Engine", "step"), ["module vllm.gone is not there"]),
        (
            point("vllm.engine:Engine", "step(request,tokens)"),
            ["vllm.engine:Engine.step takes (tokens), not (request, tokens)"],
        ),
        (
            point("vllm.engine", "start(role)"),
            ["vllm.engine:start takes (config, role), not (role)"],
        ),
        (
            point("vllm.engine:Engine", "steps()"),
            ["vllm.engine:Engine.steps is no function any more"],
        ),
        (
            point("vllm.engine:Engine", "step(tokens)", derived=True),
            ["vllm.engine:Engine asks for reset, which kvtier does not have"],
        ),
    ],
)
def test_what_has_moved_is_named(wanted: TouchPoint, moved: list[str]) -> None:
    assert list(Sources(SOURCES.get).lacks(wanted)) == moved


def test_a_wheel_is_looked_at_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        point("vllm.engine:Engine", "_requests"),
        TouchPoint(
            **{**_fields(point("vllm.engine:Engine", "_jobs")), "since": (0, 40), "until": (0, 40)}
        ),
    )
    monkeypatch.setattr(versions, "TOUCH_POINTS", points)
    with zipfile.ZipFile(io.BytesIO(), "w") as archive:
        for name, text in SOURCES.items():
            archive.writestr(name, text)
        assert [each.moved for each in check(wheel(archive), (0, 39))] == [[]]
        assert [each.point for each in check(wheel(archive), (0, 41))] == [points[0]]
        later = check(wheel(archive), (0, 40))
    assert [bool(each.moved) for each in later] == [False, True]
    *lines, total = as_lines(later)
    assert total == "1 of 2 touch-points are there as expected"
    assert lines[0] == "ok    vllm.engine:Engine (x.py)"
    assert lines[-1].endswith("why: because")


def _fields(point: TouchPoint) -> dict[str, object]:
    return {name: getattr(point, name) for name in point.__struct_fields__}


@pytest.mark.parametrize("moved", [[], ["a is not there", "b is not there"]])
def test_a_version_that_was_never_tested(
    moved: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    findings = [TouchPointCheck(TOUCH_POINTS[0], moved)]
    monkeypatch.setattr(versions, "touch_points", lambda version: findings)
    for version in ("0.34.0", "0.32.1+cpu"):
        if moved:
            with pytest.raises(ConfigError, match="a is not there; b is not there"):
                versions.check_version(version)
        else:
            versions.check_version(version)
    with caplog.at_level(logging.WARNING):
        versions.warn_if_untested("0.32.1+cpu")
        assert not caplog.records
        versions.warn_if_untested("0.34.0")
    (record,) = caplog.records
    assert "0.32 and 0.33" in record.getMessage()


def test_one_that_was_tested_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "touch_points", lambda version: pytest.fail("it takes a second"))
    for version in versions.TESTED:
        versions.check_version(f"{version}+cpu")


def hook_files() -> list[Path]:
    return sorted(HOOKS.glob("*.py"))


@pytest.mark.parametrize("path", hook_files(), ids=lambda path: path.stem)
def test_all_that_is_touched_is_in_the_table(path: Path) -> None:
    """What is imported from vLLM, and each private name of somebody else's."""
    targets = {each.target for each in TOUCH_POINTS}
    members = {name for each in TOUCH_POINTS for name in each.names}
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for each in node.names:
                known = f"{node.module}:{each.name}" in targets or (
                    f"{node.module}.{each.name}" in targets
                    or (node.module in targets and each.name in members)
                )
                assert known, f"{path}:{node.lineno}: {each.name} is not in the table"
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            mine = ast.unparse(node.value) in ("self", "cls") or node.attr in own
            known = mine or node.attr in members | {"_replace"}
            assert known, f"{path}:{node.lineno}: {ast.unparse(node)} is not in the table"


def test_each_entry_says_what_it_is_for() -> None:
    files = {path.name for path in hook_files()}
    for each in TOUCH_POINTS:
        assert each.used_by in files
        assert each.why
        assert each.members
