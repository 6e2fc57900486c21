"""What a stack file may say, as JSON Schema: for editors, and for the reference of all settings."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Sequence
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
