"""Plain values into settings, field by field, so that every mistake is found in one go."""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from kvtier.config.document import Document, at
from kvtier.settings import dec_hook

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
Reader = Callable[[object, str], object]

_FAILURE = re.compile(r"(?P<text>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_CREDENTIAL = re.compile(r"access_key|secret|password|(session|security)_token", re.IGNORECASE)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


RENAMED: Mapping[str, Mapping[str, str]] = {
    "$": {"loads": "load_policy"},
    "$.prefetch": {"restart": "warmup_share"},
    "$.retain": {"longest": "max_ttl"},
}
"""Settings that had another name in 0.1, by their place: read for one release, with a warning."""
RENAMED_WORDS: Mapping[str, Mapping[str, str]] = {"$.load_policy": {"worthwhile": "cost_model"}}
"""Words that settings in these places had in 0.1."""


def decode(
    kind: type[T],
    value: object,
    place: str,
    document: Document,
    readers: Mapping[str, Reader] | None = None,
) -> T | None:
    """Read one struct; None, and the problems reported, if something is wrong with it.

    `readers` read the fields that need more than their type: given value and place, they answer
    the field's value and report problems themselves.
    """
    if not isinstance(value, Mapping):
        document.report(place, f"is {_shape(value)}", f"write a mapping with {_names(kind)}")
        return None
    config = kind.__struct_config__
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    tag = config.tag_field
    before = len(document.problems)
    found: dict[str, Any] = {}
    value = {_today(place, key, value): part for key, part in value.items()}
    for key, part in value.items():
        if key in fields:
            inner = f"{place}.{key}"
            part = _word_today(inner, part)
            reader = (readers or {}).get(key)
            found[fields[key].name] = (
                reader(part, inner) if reader else _field(fields[key].type, part, inner, document)
            )
        elif key != tag:
            _unknown_key(document, place, key, [*([tag] if tag else []), *fields])
    for name, field in fields.items():
        if field.required and name not in value:
            document.report(place, f'lacks "{name}"', f"add it: {name}: {_example(field.type)}")
    if len(document.problems) > before:
        return None
    try:
        return kind(**found)
    except ValueError as error:  # what a struct's own __post_init__ finds
        problem, _, remedy = str(error).partition("; ")
        document.report(place, problem, remedy)
        return None


def _today(place: str, key: str, value: Mapping[str, object]) -> str:
    """The name that a setting has now; one that stands there by both names keeps its old one, which
    is not known."""
    name = RENAMED.get(place, {}).get(key, key)
    if name == key or name in value:
        return key
    logger.warning("%s.%s is called %s now: the next release reads that alone", place, key, name)
    return name


def _word_today(place: str, value: object) -> object:
    words = RENAMED_WORDS.get(place, {})
    if not isinstance(value, str) or value not in words:
        return value
    logger.warning("%s: %s is called %s now", place, value, words[value])
    return words[value]


def suggest(word: object, known: Sequence[str]) -> str:
    """Ask for the known word that is most like this one; nothing if none is."""
    near = get_close_matches(str(word), known, n=1)
    return f'did you mean "{near[0]}"?' if near else ""


def _unknown_key(document: Document, place: str, key: str, known: list[str]) -> None:
    remedy = suggest(key, known)
    if not remedy and _CREDENTIAL.search(key):
        remedy = "remove it: credentials come from the environment, a profile or a role"
    known_ones = f"known are {', '.join(known)}"
    document.report(at(place, key), f'unknown key "{key}"', remedy or known_ones)


def _field(kind: Any, value: object, place: str, document: Document) -> object:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return decode(kind, value, place, document)
    # A text from the environment may stand for a number: the environment knows only texts.
    strict = not document.interpolated(place)
    try:
        return msgspec.convert(value, kind, strict=strict, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        said = str(error)
    if not strict:
        # A type's own message may quote a part of the value, which `redact` would not recognise.
        try:
            msgspec.convert(
                document.as_written(place, value), kind, strict=False, dec_hook=dec_hook
            )
        except msgspec.ValidationError as error:
            said = str(error) if "; " in str(error) else said
    match = _FAILURE.fullmatch(said)
    assert match is not None
    text, path = match.group("text"), match.group("path") or ""
    problem, separator, remedy = text.partition("; ")
    if not separator:
        problem, remedy = _in_words(problem, value if not path else None), _remedy(kind, value)
    document.report(place + path, problem, remedy)
    return None


def _in_words(problem: str, value: object) -> str:
    """msgspec's words for a mistake, in the words of someone who writes YAML."""
    if problem.startswith("Invalid enum value"):
        return f"{str(value)!r} is not one of the words known here"
    if "matching regex" in problem:
        return f"{str(value)!r} is not of this form"
    problem = re.sub(
        r"`([^`]*)`",
        lambda match: " or ".join(_WORDS.get(word, word) for word in match.group(1).split(" | ")),
        problem,
    )
    return problem[:1].lower() + problem[1:]


def _remedy(kind: Any, value: object) -> str:
    if get_origin(kind) in (Union, UnionType):
        remedies = (_remedy(each, value) for each in get_args(kind) if each is not NoneType)
        return next(filter(None, remedies), "")
    bare = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    words = [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
    if isinstance(bare, type) and issubclass(bare, enum.Enum):
        words = [str(member.value) for member in bare]
    if words:
        return suggest(value, words) or f"write one of {', '.join(words)}"
    if bare not in (int, float, str, bool):
        return ""
    limits = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    least = [f", {meta.ge} or more" for meta in limits if meta.ge is not None]
    most = [f", at most {meta.le}" for meta in limits if meta.le is not None]
    form = [f" of {meta.extra['form']}" for meta in limits if meta.extra]
    return f"write {_WORDS[bare.__name__]}{''.join(least + most + form)}"


def _example(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return str(get_args(kind)[0])
    schema = getattr(kind, "schema", {})
    return str(schema.get("examples", ["..."])[0])


def _names(kind: type[msgspec.Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(kind)) or "settings"


def _shape(value: object) -> str:
    if value is None:
        return "empty"
    return "a list" if isinstance(value, list) else "a single value"
