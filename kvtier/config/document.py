"""YAML text as plain values with their places, these as structs, and what is wrong with them."""

from __future__ import annotations

import enum
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from kvtier.errors import ConfigError, ConfigErrors
from kvtier.settings import dec_hook

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
    """Reads the scalars of YAML 1.2, where `no` is a text, `010` is ten and dates are texts. It
    bounds open brackets, through all of which the scanner looks with each token."""

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
    """Put the environment's values into a text; `report` is told problems and their remedies.

    `${NAME}` is the value of NAME, `${NAME:-default}` has a default for when it is unset or empty,
    and `$${` stands for a plain `${`.
    """
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


# -- from a document to types ----------------------------------------------------------------------


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
