"""Values of the environment in the texts of a document, and how messages name them.

`${NAME}` is the environment's value of NAME, `${NAME:-default}` has a default for when it is unset
or empty, and `$${` stands for a plain `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

SHORT = 4
"""A shorter value is hidden only in messages about its own text: it may be part of any word."""

_PLACEHOLDER = re.compile(r"\$?\$\{([^}]*)(\}?)")
_INSIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-((?:(?!\$\{).)*))?", re.DOTALL)


class Substituted(NamedTuple):
    """A text with the environment's values put in."""

    text: str
    written: str
    """As it stands in the document."""
    values: dict[str, str]
    """What was put in, by the names of variables."""


def redact(message: str, values: Mapping[str, str]) -> str:
    """Name the variables in a message in place of their values."""
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        # As it is, and as `repr` writes it alone or beside a quotation mark.
        for form in (value, repr(value)[1:-1], repr('"' + value)[2:-1]):
            message = message.replace(form, f"${{{name}}}")
    return message


def substitute(text: str, report: Callable[[str, str], None]) -> Substituted:
    """Put the environment's values into a text; `report` hears of problems, and of a remedy."""
    values: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        if match.group().startswith("$$"):
            return match.group()[1:]
        inside = _INSIDE.fullmatch(match.group(1))
        if inside is None or not match.group(2):
            remedy = 'write "${NAME}" or "${NAME:-default}", and "$${" for a plain "${"'
            report(f"{match.group()!r} names no variable", remedy)
            return ""
        name, default = inside.groups()
        value = os.environ.get(name, "")
        if value:
            values[name] = value
        elif default is not None:
            return str(default)
        elif name not in os.environ:
            remedy = f'set it, or give a default: "${{{name}:-default}}"'
            report(f"the environment has no variable {name}", remedy)
        return value

    return Substituted(_PLACEHOLDER.sub(replace, text), text, values)
