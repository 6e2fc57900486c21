"""Print docs/reference/configuration.md: all settings of a stack file, made from their types.

python tools/configuration_reference.py > docs/reference/configuration.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvtier.config import StackConfig
from kvtier.config.schema import PLACEHOLDER, Form, Schema
from kvtier.interfaces.backend import kinds
from kvtier.settings import TierSettings

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "mapping",
}


def reference(names: Sequence[str]) -> str:
    """The configuration reference in Markdown, for these kinds of tier."""
    schema = Schema(names)
    parts = schema.parts
    stack = _resolved(schema.form(StackConfig), parts)["properties"]
    common = schema.struct(TierSettings)["properties"]
    del common["kind"]
    text = [_HEAD, *_tables(stack, parts, "##"), _TIERS, *_tables(common, parts, "##")]
    words = [*_reference_words(stack, parts), *_reference_words(common, parts)]
    for kind in (_resolved(form, parts) for form in schema.form(TierSettings)["anyOf"]):
        settings = kind["properties"]
        (name,) = settings.pop("kind")["enum"]
        own = {name: form for name, form in settings.items() if common.get(name) != form}
        text += [f"### kind: {name}\n\n{kind['description']}\n", *_tables(own, parts, "####")]
        words += _reference_words(settings, parts)
    text.append("## Words\n")
    for setting, part in dict.fromkeys(words):
        text.append(f"`{setting}`: {parts[part]['description']}\n")
        lines = (f"- `{word['const']}`: {word['description']}\n" for word in parts[part]["oneOf"])
        text.append("".join(lines))
    return "\n".join(text)


def _tables(settings: Form, parts: Form, level: str) -> Iterator[str]:
    """The table of a mapping, and those of the mappings in it."""
    if settings:
        rows = [_row(name, form, parts) for name, form in settings.items()]
        yield "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    else:
        yield "It has no settings of its own.\n"
    for name, form in settings.items():
        for part in (_resolved(each, parts) for each in _alternatives(form)):
            if "properties" in part:
                yield f"{level} {name}\n\n{part['description']}\n"
                yield from _tables(part["properties"], parts, level)


def _row(name: str, form: Form, parts: Form) -> str:
    kind = _type(form, parts)
    default = form.get("default")
    shown = "" if "default" in form else "required"
    if default is not None and kind != "mapping":
        shown = f"`{default if isinstance(default, str) else json.dumps(default)}`"
    return f"| `{name}` | {kind} | {shown} | {form.get('description', '')} |"


def _type(form: Form, parts: Form) -> str:
    if "title" in form:
        return str(form["title"])
    if "anyOf" in form:
        return " or ".join(_type(each, parts) for each in _alternatives(form))
    part = _resolved(form, parts)
    words = [word["const"] for word in part.get("oneOf", ())] or part.get("enum", ())
    return " ".join(f"`{word}`" for word in words) or _TYPES[part.get("type", "object")]


def _reference_words(settings: Form, parts: Form) -> Iterator[tuple[str, str]]:
    """The settings, those of mappings in them too, whose values are words; and their part."""
    for name, form in settings.items():
        for each in _alternatives(form):
            part = _resolved(each, parts)
            if "oneOf" in part:
                yield name, part["title"]
            yield from _reference_words(part.get("properties", {}), parts)


def _alternatives(form: Form) -> list[Form]:
    forms = form.get("anyOf", [form])
    return [each for each in forms if each not in (PLACEHOLDER, {"type": "null"})]


def _resolved(form: Form, parts: Form) -> Form:
    """The part that a form refers to, or the form itself."""
    found: Form = parts[form["$ref"].removeprefix("#/$defs/")] if "$ref" in form else form
    return found


_HEAD = """\
# Configuration

<!-- Made by tools/configuration_reference.py; `make docs` writes it again. -->

A stack is one YAML file. `kvtier config init` writes one for this machine, `kvtier config check`
says what is wrong with one, `kvtier config show` prints one with everything filled in, and
`configs/` has ready ones. An inline stack (nested dicts) has the same settings, which mean the
same.

- A **size** is a number and a unit: `64GiB`, `512MiB`, `2TB`. A **share** is a percentage of the
  medium: `80%`. A **duration** is a number and a unit: `250ms`, `10s`.
- `${NAME}` in a value stands for the environment variable NAME, `${NAME:-default}` has a default
  for when it is unset or empty, and `$${` stands for a plain `${`. Messages about the file, and
  `config show`, name the variable, not its value. Once a tier is used, its path or url appears
  in listings and logs like any other.
- An unknown key is an error, and so is everything else that kvtier would not read.
- Write absolute paths: a relative one starts from the folder in which the server or command was
  started, not from that of the file.
- `# yaml-language-server: $schema=./schema.json` in the first line lets an editor complete and
  check; `kvtier config schema` prints that schema, with the tier kinds of other packages too.

## The file
"""

_TIERS = """\
## tiers

Each tier has a `kind`, these settings, and those of its kind:
"""


if __name__ == "__main__":
    print(reference(kinds(built_in=True)).rstrip())
