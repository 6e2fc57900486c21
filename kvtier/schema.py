"""What a stack file may say, for editors (JSON Schema) and for people (Markdown).

Both are made from the types, and the text under a field in its class is its description.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from kvtier.config import StackConfig
from kvtier.core.interfaces.backend import backend
from kvtier.core.settings import TierSettings
from kvtier.core.values import Value, schema_hook, show_hook

_ABSENT = object()
_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


def json_schema(names: Sequence[str]) -> dict[str, Any]:
    """JSON Schema of a stack file that may use these kinds of tier."""
    mirror = _Mirror()
    tier: Any = Union[tuple(mirror.struct(backend(name).settings) for name in names)]  # noqa: UP007
    stack = mirror.struct(StackConfig, tiers=list[tier])
    (root,), parts = msgspec.json.schema_components(
        [stack], schema_hook=schema_hook, ref_template="#/$defs/{name}"
    )
    for name, struct in mirror.originals.items():
        texts = descriptions(struct)
        parts[name]["description"] = _doc(struct)
        for field in msgspec.structs.fields(struct):
            entry = parts[name]["properties"][field.encode_name]
            if field.name in texts:
                entry["description"] = texts[field.name]
            if isinstance(field.default, Value | Path | msgspec.Struct):
                entry["default"] = msgspec.to_builtins(field.default, enc_hook=show_hook)
            if not _holds_struct(field.type) and field.type not in (str, Path):
                _allow_variable(entry)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A kvtier stack",
        **root,
        "$defs": dict(sorted(parts.items())),
    }


def _allow_variable(entry: dict[str, Any]) -> None:
    """Let a value that is not any text come from the environment all the same."""
    kept = {"title", "description", "default", "examples"}
    form = {name: entry.pop(name) for name in list(entry) if name not in kept}
    entry["anyOf"] = [*form.get("anyOf", [form]), {"type": "string", "pattern": r"\$\{"}]


class _Mirror:
    """Copies of structs without the defaults that msgspec cannot write into a schema."""

    def __init__(self) -> None:
        self.originals: dict[str, type[msgspec.Struct]] = {}
        self._copies: dict[type[msgspec.Struct], type[msgspec.Struct]] = {}

    def struct(self, kind: type[msgspec.Struct], **types: object) -> type[msgspec.Struct]:
        if kind in self._copies:
            return self._copies[kind]
        config = kind.__struct_config__
        name = kind.__name__
        if name in self.originals:
            name = f"{kind.__module__}.{name}"
        self.originals[name] = kind
        fields = [
            (field.name, types.get(field.name, self._type(field.type)), *self._default(field))
            for field in msgspec.structs.fields(kind)
        ]
        self._copies[kind] = msgspec.defstruct(
            name,
            fields,
            kw_only=True,
            forbid_unknown_fields=True,
            tag=config.tag,
            tag_field=config.tag_field,
        )
        return self._copies[kind]

    def _type(self, kind: Any) -> Any:
        if _is_struct(kind):
            return self.struct(kind)
        if get_origin(kind) in (Union, UnionType):
            return Union[tuple(self._type(each) for each in get_args(kind))]  # noqa: UP007
        return kind

    @staticmethod
    def _default(field: Any) -> list[Any]:
        if field.required:
            return []
        if isinstance(field.default, Value | Path | msgspec.Struct):
            return [msgspec.field(default_factory=partial(getattr, field, "default"))]
        if field.default is msgspec.NODEFAULT:
            return [msgspec.field(default_factory=field.default_factory)]
        return [field.default]


def reference(names: Sequence[str]) -> str:
    """The configuration reference in Markdown, for these kinds of tier."""
    parts = [_HEAD, *_tables(StackConfig, "##"), _TIERS, *_tables(TierSettings, "##")]
    common = {field.name: field.default for field in msgspec.structs.fields(TierSettings)}
    for name in names:
        settings = backend(name).settings
        fields = msgspec.structs.fields(settings)
        own = [each for each in fields if common.get(each.name, _ABSENT) != each.default]
        parts.append(f"### kind: {name}\n\n{_doc(settings)}\n")
        parts.extend(_tables(settings, "####", own))
    parts.append("## Words\n")
    structs: list[type[msgspec.Struct]] = [StackConfig, TierSettings]
    structs += (backend(name).settings for name in names)
    for setting, words in dict.fromkeys(pair for struct in structs for pair in _words(struct)):
        texts = descriptions(words)
        parts.append(f"`{setting}`: {_doc(words)}\n")
        parts.append("".join(f"- `{each.value}`: {texts.get(each.name, '')}\n" for each in words))
    return "\n".join(parts)


def _words(kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[enum.Enum]]]:
    """The settings of a struct, and of the structs in it, whose values are words."""
    for field in msgspec.structs.fields(kind):
        if _is_enum(field.type):
            yield field.encode_name, field.type
        elif _is_struct(field.type):
            yield from _words(field.type)


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


def _doc(kind: type) -> str:
    """A class's own words: those of the class that it is derived from are about something else."""
    return inspect.cleandoc(kind.__doc__ or "")


def _tables(
    kind: type[msgspec.Struct], level: str, fields: Sequence[Any] | None = None
) -> Iterator[str]:
    """The table of a struct, and those of the structs in it."""
    fields = msgspec.structs.fields(kind) if fields is None else fields
    yield _rows(kind, fields) if fields else "It has no settings of its own.\n"
    for field in fields:
        for part in (field.type, *get_args(field.type)):
            if _is_struct(part) and part is not TierSettings:
                yield f"{level} {field.encode_name}\n\n{_doc(part)}\n"
                yield from _tables(part, level)


def _rows(kind: type, fields: Sequence[Any]) -> str:
    texts = descriptions(kind)
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        default = "required" if field.required else _default(field)
        text = texts.get(field.name, "")
        lines.append(f"| `{field.encode_name}` | {_type(field.type)} | {default} | {text} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or isinstance(value, msgspec.Struct):
        return ""
    plain = msgspec.to_builtins(value, enc_hook=show_hook)
    return f"`{plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()}`"


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is Annotated or hasattr(kind, "__metadata__"):
        return _type(get_args(kind)[0])
    if _is_enum(kind):
        return " ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, Value):
        return {"ByteSize": "size", "Capacity": "size or share"}.get(
            kind.__name__, kind.__name__.lower()
        )
    if get_args(kind) and type(None) in get_args(kind):
        return " or ".join(_type(each) for each in get_args(kind) if each is not type(None))
    if _is_struct(kind):
        return "mapping"
    return _TYPES.get(kind, "list" if get_origin(kind) in (list, tuple) else "mapping")


def _is_enum(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _holds_struct(kind: Any) -> bool:
    return _is_struct(kind) or any(_holds_struct(part) for part in get_args(kind))


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
