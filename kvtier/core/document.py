"""A configuration document: plain values, and for each where it stands in the file.

Read from YAML text or from nested dicts. `${NAME}` in a text is the environment's value of NAME,
`${NAME:-default}` has a default, and `$${` stands for a plain `${`. What came from the environment
is not shown in what is said of the document, nor when it is printed: the variable is named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

import yaml

from kvtier.errors import ConfigError, ConfigErrors

FILE_BYTES_MAX = 1 << 20
NODES_MAX = 20_000
DEPTH_MAX = 32
_SHORT = 4
"""A shorter value of the environment is hidden only where it stands: it may be part of any word."""

_VARIABLE = re.compile(r"\$?\$\{([^}]*)(\}?)")
_INSIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-((?:(?!\$\{).)*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Document:
    """Values with their places (like `$.tiers[1].capacity`), and the problems found in them."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.value: object = None
        self.problems: list[ConfigError] = []
        self._lines: dict[str, tuple[int, int]] = {}
        self._written: dict[str, str] = {}
        self._secrets: dict[str, dict[str, str]] = {}
        self._nodes = 0
        self._unread = 0
        """So many of the problems, the first ones, are of what could not be read."""

    @classmethod
    def from_file(cls, path: Path) -> Document:
        """Read a YAML file; raises ConfigErrors if it cannot be read or is no YAML."""
        name = str(path)
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            _refuse(
                name,
                "there is no such file",
                "name one that exists, or write one: kvtier config init",
            )
        except OSError as error:
            _refuse(name, f"cannot be read: {error.strerror}", "name a YAML file that you may read")
        if len(data) > FILE_BYTES_MAX:
            _refuse(name, f"has more than {FILE_BYTES_MAX} bytes", "a stack file is a short text")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            _refuse(name, f"byte {error.start} is not UTF-8", "save the file as UTF-8 text")
        return cls.from_text(text, name)

    @classmethod
    def from_text(cls, text: str, name: str = "") -> Document:
        """Read YAML text; raises ConfigErrors if it is none."""
        document = cls(name)
        try:
            root = _Composer(text).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            line = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
            problem = str(error.problem)
            if problem.startswith("but"):  # as of a second document
                problem = f"{error.context}, {problem}"
            elif problem.startswith("expected <block end>"):
                problem = "this line is not indented as those that it belongs to"
            raise ConfigErrors(
                [ConfigError("$", f"not YAML: {problem}", "correct it there", line)]
            ) from None
        except yaml.reader.ReaderError as error:
            *lines, last = text[: error.position].split("\n")
            line = f"{name}:{len(lines) + 1}:{len(last) + 1}"
            problem = f"not YAML: the character {text[error.position]!r} cannot stand there"
            remedy = "save the file as plain UTF-8 text"
            raise ConfigErrors([ConfigError("$", problem, remedy, line)]) from None
        if root is None:
            _refuse(name or "$", "is empty", "write one: kvtier config init")
        document._take(document._from_node(root, "$", 0))
        return document

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Document:
        """Take nested dicts and lists, as they come from YAML or JSON that somebody else read."""
        document = cls()
        document._take(document._from_object(value, "$", 0))
        return document

    def _take(self, value: object) -> None:
        self.value = value
        self._unread = len(self.problems)
        if self._nodes > NODES_MAX:
            raise ConfigErrors(self.problems)

    def report(self, place: str, problem: str, remedy: str = "") -> None:
        """Note a problem, with its line, and without the environment's values."""
        self.problems.append(
            ConfigError(
                place, self._redact(place, problem), self._redact(place, remedy), self._line(place)
            )
        )

    def check(self) -> None:
        """Raise what was reported, in the order of the file."""
        unread, others = self.problems[: self._unread], self.problems[self._unread :]
        # That a value which could not be read is not the right one follows from it.
        places = {error.place for error in unread}
        problems = unread + [error for error in others if error.place not in places]
        if problems:
            order = {place: index for index, place in enumerate(self._lines)}
            last = len(order)
            problems.sort(key=lambda error: order.get(self._nearest(error.place), last))
            raise ConfigErrors(problems)

    def interpolated(self, place: str) -> bool:
        """Whether a text at or below this place holds a value of the environment."""
        return any(_is_within(known, place) for known in self._secrets)

    def as_written(self, place: str, value: object) -> object:
        """This value, with the texts that hold values of the environment as they stand there."""
        if self._secrets.get(place):
            return self._written[place]
        if isinstance(value, dict):
            return {key: self.as_written(_at(place, key), part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_written(_at(place, index), part) for index, part in enumerate(value)]
        return value

    def _from_node(self, node: yaml.Node, place: str, depth: int) -> object:
        self._lines.setdefault(place, (node.start_mark.line + 1, node.start_mark.column + 1))
        if not self._has_room(place, depth):
            return None
        if node.tag not in _TAGS:
            self.report(place, f"the tag {node.tag!r} is not for stack files", "remove it")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._from_node(item, _at(place, index), depth + 1)
                for index, item in enumerate(node.value)
            ]
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return self._interpolate(node.value, place)
        try:
            return _SCALARS[kind](node.value)
        except (KeyError, ValueError):
            self.report(place, f"{node.value!r} is no YAML {kind}", "remove the tag")
            return None

    def _mapping(self, node: yaml.MappingNode, place: str, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith(":str"):
                self.report(place, "a key is not a text", "write names of settings as keys")
                continue
            key = key_node.value
            inner = _at(place, key)
            mark = key_node.start_mark
            line = mark.line + 1
            if key in found:
                self.report(inner, f"stands twice, again in line {line}", "keep one of them")
                continue
            self._lines[inner] = (line, mark.column + 1)
            found[key] = self._from_node(value_node, inner, depth + 1)
        return found

    def _from_object(self, value: object, place: str, depth: int) -> object:
        if not self._has_room(place, depth):
            return None
        if isinstance(value, Mapping):
            found: dict[str, object] = {}
            for key, part in value.items():
                if isinstance(key, str):
                    found[key] = self._from_object(part, _at(place, key), depth + 1)
                else:
                    self.report(place, "a key is not a text", "write names of settings as keys")
            return found
        if isinstance(value, list | tuple):
            return [
                self._from_object(part, _at(place, index), depth + 1)
                for index, part in enumerate(value)
            ]
        if isinstance(value, str):
            return self._interpolate(value, place)
        if value is None or isinstance(value, bool | int | float):
            return value
        self.report(place, f"a {type(value).__name__} cannot stand here", "write plain values")
        return None

    def _has_room(self, place: str, depth: int) -> bool:
        """Bound what aliases and hostile nesting can make of a short text."""
        self._nodes += 1
        if depth <= DEPTH_MAX and self._nodes <= NODES_MAX:
            return True
        if self._nodes <= NODES_MAX + 1:
            self.report(place, "nested too deep or repeated too often", "write the values out")
            self._nodes = NODES_MAX + 1
        return False

    def _interpolate(self, text: str, place: str) -> str | None:
        """Put the environment's values in; None if that cannot be done."""
        before = len(self.problems)
        if "\0" in text:
            self.report(place, "holds a NUL character, which no setting may have", "remove it")
        values: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            if match.group().startswith("$$"):
                return match.group()[1:]
            inside = _INSIDE.fullmatch(match.group(1))
            if inside is None or not match.group(2):
                self.report(
                    place,
                    f"{match.group()!r} names no variable",
                    'write "${NAME}" or "${NAME:-default}", and "$${" for a plain "${"',
                )
                return ""
            name, default = inside.groups()
            value = os.environ.get(name, "")
            if value:
                values[name] = value
            elif default is not None:
                return str(default)
            elif name not in os.environ:
                self.report(
                    place,
                    f"the environment has no variable {name}",
                    f'set it, or give a default: "${{{name}:-default}}"',
                )
            return value

        result = text
        if "${" in text:
            result = _VARIABLE.sub(replace, text)
            self._written[place] = text
            self._secrets[place] = values
        # YAML's escapes and the environment may hold what no file can be named, nor told.
        if any("\ud800" <= letter <= "\udfff" for letter in result):
            self.report(place, "holds bytes that are no UTF-8 text", "remove them")
        return result if len(self.problems) == before else None

    def _redact(self, place: str, text: str) -> str:
        """Replace what came from the environment by the name of its variable."""
        for known, values in self._secrets.items():
            here = known == place
            for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
                if here or len(value) >= _SHORT:
                    # As it is, and as `repr` writes it alone or beside a quotation mark.
                    for form in (value, repr(value)[1:-1], repr('"' + value)[2:-1]):
                        text = text.replace(form, f"${{{name}}}")
        return text

    def _nearest(self, place: str) -> str:
        while place and place not in self._lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return place

    def _line(self, place: str) -> str:
        mark = self._lines.get(self._nearest(place))
        return f"{self.name}:{mark[0]}:{mark[1]}" if mark and self.name else ""


class _Composer(yaml.SafeLoader):
    """YAML with the scalars of its version 1.2: `no` is a text, `010` is ten, dates are texts."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > 2 * DEPTH_MAX:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="nested too deep", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


_SCALARS: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": lambda text: int(text, 0) if text[:2] in ("0x", "0o") else int(text),
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in (*_SCALARS, "str", "seq", "map")}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Composer.add_implicit_resolver(_TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)


def _at(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if _NAME.fullmatch(key) else f"{place}[{key!r}]"


def _is_within(place: str, outer: str) -> bool:
    return place.startswith(outer) and place[len(outer) : len(outer) + 1] in ("", ".", "[")


def _refuse(place: str, problem: str, remedy: str) -> Never:
    raise ConfigErrors([ConfigError(place, problem, remedy)])
