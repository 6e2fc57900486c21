"""A configuration document: plain values, their places, and the problems found in them.

It is read from YAML text or from nested dicts. Values of the environment never appear in messages
about it, nor when it is printed: the variable is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from kvtier.config.environment import SHORT, Substituted, redact, substitute
from kvtier.config.yaml_positions import DEPTH_MAX, compose, line_of, read_text, value_of
from kvtier.errors import ConfigError, ConfigErrors

NODES_MAX = 20_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Document:
    """Values with their places (like `$.tiers[1].capacity`), and the problems found in them."""

    def __init__(self, root: object = None, name: str = "") -> None:
        self.name = name
        self.problems: list[ConfigError] = []
        self._marks: dict[str, yaml.Mark] = {}
        self._substituted: dict[str, Substituted] = {}
        self._hidden: dict[str, str] = {}
        """Values of the environment, by variable, that no message may show."""
        self._nodes = 0
        self.value = self._read(root, "$", 0)
        self._unread = len(self.problems)
        """The number of problems found while reading; those of decoding come after them."""
        if self._nodes > NODES_MAX:
            raise ConfigErrors(self.problems)

    @classmethod
    def from_file(cls, path: Path) -> Document:
        """Read a YAML file; raises ConfigErrors if it cannot be read or is no YAML."""
        return cls.from_text(read_text(path), str(path))

    @classmethod
    def from_text(cls, text: str, name: str = "") -> Document:
        """Read YAML text; raises ConfigErrors if it is none."""
        return cls(compose(text, name), name)

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Document:
        """Take nested dicts and lists, as they come from YAML or JSON that somebody else read."""
        return cls(value)

    def report(self, place: str, problem: str, remedy: str = "") -> None:
        """Note a problem, with its line, and without the environment's values."""
        own = self._substituted.get(place)
        hidden = self._hidden | own.values if own else self._hidden
        problem, remedy = redact(problem, hidden), redact(remedy, hidden)
        mark = self._marks.get(self._nearest(place))
        line = line_of(self.name, mark) if mark and self.name else ""
        self.problems.append(ConfigError(place, problem, remedy, line))

    def check(self) -> None:
        """Raise what was reported, in the order of the file."""
        unread, others = self.problems[: self._unread], self.problems[self._unread :]
        # A value that could not be read is None, and no decoder accepts that: say it once.
        places = {error.place for error in unread}
        problems = unread + [error for error in others if error.place not in places]
        if problems:
            order = {place: index for index, place in enumerate(self._marks)}
            problems.sort(key=lambda error: order.get(self._nearest(error.place), len(order)))
            raise ConfigErrors(problems)

    def interpolated(self, place: str) -> bool:
        """Whether a text at or below this place has a placeholder."""
        return any(_is_within(known, place) for known in self._substituted)

    def as_written(self, place: str, value: object) -> object:
        """This value, with the texts that hold values of the environment as they stand there."""
        if place in self._substituted and self._substituted[place].values:
            return self._substituted[place].written
        if isinstance(value, dict):
            return {key: self.as_written(at(place, key), part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_written(at(place, index), part) for index, part in enumerate(value)]
        return value

    def _read(self, value: object, place: str, depth: int) -> object:
        """A YAML node, or a Python value, as plain values; None, and a report, if it is neither."""
        if isinstance(value, yaml.Node):
            self._marks.setdefault(place, value.start_mark)
        if not self._has_room(place, depth):
            return None
        if isinstance(value, yaml.Node):
            try:
                value = value_of(value)
            except ValueError as error:
                self.report(place, *error.args)
                return None
        if isinstance(value, Mapping):
            return self._read_mapping(value, place, depth)
        if isinstance(value, list | tuple):
            parts = enumerate(value)
            return [self._read(part, at(place, index), depth + 1) for index, part in parts]
        if isinstance(value, str):
            return self._read_text(value, place)
        if value is None or isinstance(value, bool | int | float):
            return value
        self.report(place, f"a {type(value).__name__} cannot stand here", "write plain values")
        return None

    def _read_mapping(
        self, value: Mapping[object, object], place: str, depth: int
    ) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, part in value.items():
            mark = None
            if isinstance(key, yaml.Node):
                mark = key.start_mark
                key = key.value if key.tag.endswith(":str") else None
            if not isinstance(key, str):
                self.report(place, "a key is not a text", "write names of settings as keys")
                continue
            inner = at(place, key)
            if mark is not None and key in found:
                problem = f"stands twice, again in line {mark.line + 1}"
                self.report(inner, problem, "keep one of them")
                continue
            if mark is not None:
                self._marks[inner] = mark
            found[key] = self._read(part, inner, depth + 1)
        return found

    def _has_room(self, place: str, depth: int) -> bool:
        """Bound what aliases and hostile nesting can make of a short text."""
        self._nodes += 1
        if depth <= DEPTH_MAX and self._nodes <= NODES_MAX:
            return True
        if self._nodes <= NODES_MAX + 1:
            self.report(place, "nested too deep or repeated too often", "write the values out")
            self._nodes = NODES_MAX + 1
        return False

    def _read_text(self, text: str, place: str) -> str | None:
        """A text with the environment's values put in; None if that cannot be done."""
        before = len(self.problems)
        if "\0" in text:
            self.report(place, "holds a NUL character, which no setting may have", "remove it")
        if "${" in text:
            found = substitute(text, lambda problem, remedy: self.report(place, problem, remedy))
            self._substituted[place] = found
            self._hidden |= {
                name: value for name, value in found.values.items() if len(value) >= SHORT
            }
            text = found.text
        # YAML's escapes and the environment may hold it; no file name and no message can.
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.report(place, "holds bytes that are no UTF-8 text", "remove them")
        return text if len(self.problems) == before else None

    def _nearest(self, place: str) -> str:
        while place and place not in self._marks:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return place


def at(place: str, key: str | int) -> str:
    """The place of what stands under a key, or at an index, of the value at a place."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if _NAME.fullmatch(key) else f"{place}[{key!r}]"


def _is_within(place: str, outer: str) -> bool:
    return place.startswith(outer) and place[len(outer) : len(outer) + 1] in ("", ".", "[")
