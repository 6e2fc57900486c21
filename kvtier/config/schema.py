"""What a stack file may say: as JSON Schema for editors, as a reference for people."""

from __future__ import annotations

import ast
import enum
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

import msgspec

from kvtier.config.loader import StackConfig
from kvtier.interfaces.backend import backend
from kvtier.settings import TierSettings, schema_hook, show_hook

Form = dict[str, Any]

PLACEHOLDER: Form = {"type": "string", "pattern": r"\$\{"}
"""Every setting but a mapping or a list of them may take its value from the environment."""


def json_schema(names: Sequence[str]) -> Form:
    """JSON Schema of a stack file that may use these kinds of tier."""
    schema = Schema(names)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A kvtier stack",
        **schema.form(StackConfig),
        "$defs": dict(sorted(schema.parts.items())),
    }


class Schema:
    """Forms of types, and the parts to which they refer by name: structs and words."""

    def __init__(self, names: Sequence[str]) -> None:
        self.parts: dict[str, Form] = {}
        self.tiers = [backend(name).settings for name in names]
        self._names: dict[type, str] = {}

    def form(self, kind: Any) -> Form:
        """The form of a value of this type."""
        if kind is TierSettings:
            return {"anyOf": [self.form(tier) for tier in self.tiers]}
        if _is_struct(kind) or _is_enum(kind):
            return {"$ref": f"#/$defs/{self._part(kind)}"}
        if get_origin(kind) is Literal:
            return {"enum": [*get_args(kind)]}
        if get_origin(kind) in (Union, UnionType):
            return {"anyOf": [self.form(each) for each in get_args(kind)]}
        if _holds_struct(kind) and get_origin(kind) in (list, tuple):
            return {"type": "array", "items": self.form(get_args(kind)[0])}
        if _holds_struct(kind) and get_origin(kind) is dict:
            return {"type": "object", "additionalProperties": self.form(get_args(kind)[1])}
        (form,), parts = msgspec.json.schema_components(
            [kind], schema_hook=schema_hook, ref_template="#/$defs/{name}"
        )
        self.parts |= parts
        return form

    def _part(self, kind: type) -> str:
        if kind not in self._names:
            taken = kind.__name__ in self.parts
            name = f"{kind.__module__}.{kind.__name__}" if taken else kind.__name__
            self._names[kind] = name
            self.parts[name] = {"title": name, "description": inspect.cleandoc(kind.__doc__ or "")}
            self.parts[name] |= self.struct(kind) if _is_struct(kind) else _words(kind)
        return self._names[kind]

    def struct(self, kind: type[msgspec.Struct]) -> Form:
        """The form of a mapping with the settings of a struct."""
        texts = descriptions(kind)
        properties: Form = {}
        required = []
        tag = kind.__struct_config__.tag_field
        if tag:
            properties[tag] = {"enum": [kind.__struct_config__.tag]}
            required.append(tag)
        for field in msgspec.structs.fields(kind):
            entry = self.form(field.type)
            if not _holds_struct(field.type) and field.type not in (str, Path):
                entry = _or_placeholder(entry)
            if field.name in texts:
                entry["description"] = texts[field.name]
            if field.required:
                required.append(field.encode_name)
            else:
                made = field.default is msgspec.NODEFAULT
                default = field.default_factory() if made else field.default
                entry["default"] = msgspec.to_builtins(default, enc_hook=show_hook)
            properties[field.encode_name] = entry
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def _or_placeholder(form: Form) -> Form:
    kept = {"title", "examples"}
    others = {name: part for name, part in form.items() if name not in kept}
    forms = [*others.get("anyOf", [others]), PLACEHOLDER]
    return {"anyOf": forms} | {name: form[name] for name in form if name in kept}


def _words(kind: type[enum.Enum]) -> Form:
    texts = descriptions(kind)
    return {
        "oneOf": [{"const": word.value, "description": texts.get(word.name, "")} for word in kind]
    }


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The text under each field of a class and of those it derives from."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith(("builtins", "enum", "msgspec")):
            found.update(_own_descriptions(owner))
    return found


def _own_descriptions(kind: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for line, after in zip(tree.body, tree.body[1:], strict=False):
        target = line.target if isinstance(line, ast.AnnAssign) else None
        if isinstance(line, ast.Assign):
            target = line.targets[0]  # type: ignore[assignment]
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            found[target.id] = inspect.cleandoc(str(text.value)).replace("\n", " ")
    return found


def _is_enum(kind: object) -> TypeGuard[type[enum.Enum]]:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_struct(kind: object) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _holds_struct(kind: Any) -> bool:
    return _is_struct(kind) or any(map(_holds_struct, get_args(kind)))


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

<!-- Made by `kvtier config reference`; `make docs` writes it again. -->

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
