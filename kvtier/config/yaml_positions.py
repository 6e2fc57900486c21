"""YAML text as nodes that know their line and column, with the scalars of YAML 1.2.

There `no` is a text, `010` is ten and dates are texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kvtier.errors import ConfigError, ConfigErrors

FILE_BYTES_MAX = 1 << 16
DEPTH_MAX = 32

_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_SCALARS: dict[str, tuple[str, Callable[[str], object]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (
        r"true|True|TRUE|false|False|FALSE",
        lambda text: {"true": True, "false": False}[text.lower()],
    ),
    "int": (
        r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}",
        lambda text: int(text, 0) if text[:2] in ("0x", "0o") else int(text),
    ),
    "float": (
        rf"{_NUMBER}|[-+]?\.inf|\.nan",
        lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    ),
    "str": (r"(?s:.*)", str),
}
"""For each kind of scalar, what is one if it has neither quotes nor a tag, and how it is read."""
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in (*_SCALARS, "seq", "map")}


def read_text(path: Path) -> str:
    """The text of a stack file; raises ConfigErrors if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            _refuse(path, f"has more than {FILE_BYTES_MAX} bytes", "a stack file is a short text")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        remedy = "name one that exists, or write one: kvtier config init"
        _refuse(path, "there is no such file", remedy)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "name a YAML file that you may read")
    except UnicodeDecodeError as error:
        _refuse(path, f"byte {error.start} is not UTF-8", "save the file as UTF-8 text")


def compose(text: str, name: str) -> yaml.Node:
    """The root node of a text; raises ConfigErrors, with the line, if it is no YAML."""
    line, remedy = name, "correct it there"
    try:
        root: yaml.Node | None = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        if problem.startswith("but"):  # as of a second document
            problem = f"{error.context}, {problem}"
        elif problem.startswith("expected <block end>"):
            problem = "this line is not indented as those that it belongs to"
        elif isinstance(error, _TooDeep):
            remedy = "write the values out"
        if error.problem_mark is not None:
            line = line_of(name, error.problem_mark)
    except yaml.reader.ReaderError as error:
        *lines, last = text[: error.position].split("\n")
        line = f"{name}:{len(lines) + 1}:{len(last) + 1}"
        problem = f"the character {text[error.position]!r} cannot stand there"
        remedy = "save the file as plain UTF-8 text"
    except RecursionError:
        problem, remedy = "nested too deep", "write the values out"
    else:
        if root is None:
            _refuse(name or "$", "is empty", "write one: kvtier config init")
        return root
    raise ConfigErrors([ConfigError("$", f"not YAML: {problem}", remedy, line)])


def line_of(name: str, mark: yaml.Mark) -> str:
    """Where something stands in a file, as editors count lines and columns."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def value_of(node: yaml.Node) -> object:
    """What a node holds: a dict of nodes, a list of nodes, or a plain value.

    Raises ValueError, with what is wrong and what to do, if that is nothing of these.
    """
    if node.tag not in _TAGS:
        raise ValueError(f"the tag {node.tag!r} is not for stack files", "remove it")
    if isinstance(node, yaml.MappingNode):
        found = dict(node.value)
        if len(found) < len(node.value):  # an alias of a key is the same node
            raise ValueError("a key stands twice", "keep one of them")
        return found
    if isinstance(node, yaml.SequenceNode):
        return node.value
    kind = node.tag.removeprefix(_TAG)
    try:
        return _SCALARS[kind][1](node.value)
    except (KeyError, ValueError):
        raise ValueError(f"{node.value!r} is no YAML {kind}", "remove the tag") from None


class _TooDeep(yaml.MarkedYAMLError):
    """More brackets are open than a stack can have."""


class _Composer(yaml.SafeLoader):
    """With the scalars of YAML 1.2, and no more open brackets than a document may have: with each
    token the scanner looks through all of them."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= DEPTH_MAX:
            mark = self.get_mark()
            raise _TooDeep(None, None, "nested too deep", mark)
        super().fetch_flow_collection_start(token)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:  # neither quoted nor tagged
            found = (tag for tag, (form, _) in _SCALARS.items() if re.fullmatch(form, value))
            return _TAG + next(found)
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


def _refuse(place: Path | str, problem: str, remedy: str) -> NoReturn:
    raise ConfigErrors([ConfigError(str(place), problem, remedy)]) from None
