"""What a stack file may say, for editors (JSON Schema) and for people (Markdown).

Both are made from the types, and the text under a field in its class is its description.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from kvtier.config import MoverMode, MoverSettings, StackConfig
from kvtier.core.backend import backend, kinds
from kvtier.core.settings import (
    Admission,
    Durability,
    Persistence,
    TierSettings,
    Value,
    WritePolicy,
    schema_hook,
    show_hook,
)

_ENUMS: tuple[type[enum.Enum], ...] = (WritePolicy, Admission, Persistence, Durability, MoverMode)
_ABSENT = object()
_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


def built_in_kinds() -> list[str]:
    """The kinds of tier that come with kvtier."""
    return [kind for kind in kinds() if type(backend(kind)).__module__.startswith("kvtier.")]


def json_schema(names: Sequence[str]) -> dict[str, Any]:
    """JSON Schema of a stack file that may use these kinds of tier."""
    structs: list[type[msgspec.Struct]] = [backend(name).settings for name in names]
    tiers = tuple(_plain(each) for each in structs)
    stack = _plain(StackConfig, tiers=list[Union[tiers]])  # type: ignore[valid-type] # noqa: UP007
    (root,), parts = msgspec.json.schema_components(
        [stack], schema_hook=schema_hook, ref_template="#/$defs/{name}"
    )
    structs += [StackConfig, MoverSettings]
    for struct in structs:
        texts = descriptions(struct)
        parts[struct.__name__]["description"] = inspect.getdoc(struct)
        for field in msgspec.structs.fields(struct):
            entry = parts[struct.__name__]["properties"][field.encode_name]
            if field.name in texts:
                entry["description"] = texts[field.name]
            if isinstance(field.default, Value | Path):
                entry["default"] = str(field.default)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A kvtier stack",
        **root,
        "$defs": dict(sorted(parts.items())),
    }


def _plain(kind: type[msgspec.Struct], **types: object) -> type[msgspec.Struct]:
    """The same struct without the defaults that msgspec cannot write into a schema."""
    config = kind.__struct_config__
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        annotation = types.get(field.name, field.type)
        if field.required:
            fields.append((field.name, annotation))
        elif isinstance(field.default, Value | Path):
            hidden = msgspec.field(default_factory=partial(_same, field.default))
            fields.append((field.name, annotation, hidden))
        elif field.default is msgspec.NODEFAULT:
            fresh = msgspec.field(default_factory=field.default_factory)
            fields.append((field.name, annotation, fresh))
        else:
            fields.append((field.name, annotation, field.default))
    return msgspec.defstruct(
        kind.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=True,
        tag=config.tag,
        tag_field=config.tag_field,
    )


def _same(value: object) -> object:
    return value


def reference(names: Sequence[str]) -> str:
    """The configuration reference in Markdown, for these kinds of tier."""
    parts = [_HEAD, _table(StackConfig), "## mover\n", _table(MoverSettings), _TIERS]
    parts.append(_table(TierSettings))
    common = {field.name: field.default for field in msgspec.structs.fields(TierSettings)}
    for name in names:
        settings = backend(name).settings
        fields = msgspec.structs.fields(settings)
        own = [each for each in fields if common.get(each.name, _ABSENT) != each.default]
        parts.append(f"### kind: {name}\n\n{inspect.getdoc(settings)}\n")
        parts.append(_rows(settings, own) if own else "It has no settings of its own.\n")
    parts.append("## Words\n")
    for words in _ENUMS:
        parts.append(f"**{words.__name__}**: {inspect.getdoc(words)}\n")
        texts = descriptions(words)
        parts.append("".join(f"- `{each.value}`: {texts[each.name]}\n" for each in words))
    return "\n".join(parts)


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


def _table(kind: type[msgspec.Struct]) -> str:
    return _rows(kind, msgspec.structs.fields(kind))


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
    return f"`{msgspec.json.encode(plain).decode()}`" if plain != "" else "empty"


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is Annotated or hasattr(kind, "__metadata__"):
        return _type(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, Value):
        return {"ByteSize": "size", "Capacity": "size or share"}.get(
            kind.__name__, kind.__name__.lower()
        )
    if get_args(kind) and type(None) in get_args(kind):
        return " or ".join(_type(each) for each in get_args(kind) if each is not type(None))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "mapping"
    return _TYPES.get(kind, "list" if get_origin(kind) in (list, tuple) else "mapping")


_HEAD = """\
# Configuration

<!-- Made by `kvtier config reference`; `make docs` writes it again. -->

A stack is one YAML file. `kvtier config init` writes one for this machine, `kvtier config check`
says what is wrong with one, `kvtier config show` prints what it comes to, and `configs/` has ready
ones. The same settings as nested dicts (an inline stack) mean the same.

- A **size** is a number and a unit: `64GiB`, `512MiB`, `2TB`. A **share** is a percentage of the
  medium: `80%`. A **duration** is a number and a unit: `250ms`, `10s`.
- `${NAME}` in a value is the environment's value of NAME, `${NAME:-default}` has a default for
  when it is not set or empty, and `$${` stands for a plain `${`. What comes from the environment is
  shown nowhere: messages and listings name the variable instead.
- An unknown key is an error, and so is everything else that nothing would read.
- `# yaml-language-server: $schema=./schema.json` in the first line lets an editor complete and
  check; `kvtier config schema` prints that schema, with the tier kinds of other packages too.

## The file
"""

_TIERS = """\
## tiers

Each tier has a `kind` and these settings, and those of its kind:
"""
