"""`load`, the way in: a stack file becomes a `StackConfig`, checked against this machine."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvtier.config.document import Document, at, decode, suggest
from kvtier.cost.rates import Owner
from kvtier.errors import BackendError, ConfigError, ConfigErrors, NotHere, NotWritable
from kvtier.interfaces.backend import Backend, backend, kinds
from kvtier.settings import (
    Capacity,
    Count,
    Duration,
    Gds,
    PrefetchSettings,
    RetainSettings,
    TierSettings,
    WritePolicy,
    show_hook,
)
from kvtier.types import ANY_DEGREE

VERSION = 1
TIERS_MAX = 8

_LETTERS = "letters, digits, dots, dashes and underscores, at most 64 of them"
Name = Annotated[
    str,
    msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)", extra={"form": _LETTERS}),
]


_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Longer than a stack's name, to which an engine's rank may be added."""


class MoverMode(enum.Enum):
    """Where bytes are moved."""

    AUTO = "auto"
    """In a process when an engine serves; on threads in commands and in tests."""
    PROCESS = "process"
    """In a separate process, so that nothing there can hold up or take down the engine."""
    THREADS = "threads"
    """On threads of this process."""


class MoverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bytes are moved between the tiers."""

    mode: MoverMode = MoverMode.AUTO
    """Where bytes are moved."""


class LoadPolicy(enum.Enum):
    """Which hits are loaded."""

    COST_MODEL = "cost_model"
    """Those that cost less to load than to recompute, by recent speeds."""
    ALWAYS = "always"
    """All of them."""


class RateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine has learned of its speeds: a few KiB, which start the next one."""

    keep: bool = True
    """Keep the speeds of disks, links and computing, so that the first hits after a start are
    decided by them. Only with `load_policy: cost_model`."""
    path: str = "auto"
    """The folder in which they are kept; `auto` is kvtier/rates in $XDG_STATE_HOME, or in
    ~/.local/state."""


class Sleep(enum.Enum):
    """What becomes of stored blocks when an engine sleeps, or pauses and clears its caches."""

    FORGET = "forget"
    """They go, in all tiers: other weights may be read meanwhile in ways that kvtier cannot see."""
    KEEP = "keep"
    """They are found again: for engines whose weights are changed only by vLLM's own calls for
    that, and by others whose names say so."""


class Misses(enum.Enum):
    """What is done about requests that find less than their prompts."""

    EXPLAIN = "explain"
    """The reasons are counted, and `kvtier explain --request` tells them of the last requests."""
    LOG = "log"
    """The engine's log tells them, too: a line a request."""
    IGNORE = "ignore"
    """Nothing is remembered for it."""


class StackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one file says: the tiers of a stack, fastest first, and what they share."""

    version: Literal[1]
    """The version of this format."""
    name: Name = "default"
    """The name of this engine on its machine: each name has CPU memory of its own."""
    chunk_tokens: Count = 256
    """How many tokens one stored block covers: a multiple of the engine's own block size. Models
    with a shorter window, or with states, take fewer."""
    load_policy: LoadPolicy = LoadPolicy.COST_MODEL
    """Which hits an engine loads: those that cost less than recomputing them, or all."""
    rates: RateSettings = RateSettings()
    """What an engine has learned of its speeds."""
    sleep: Sleep = Sleep.FORGET
    """Whether an engine that has slept finds its stored blocks again when it wakes up."""
    drain: Duration = Duration(1.0)
    """How long an engine that is told to end goes on writing what waits for lower tiers. The next
    engine writes the rest, as far as CPU memory is kept until then."""
    across_degrees: bool = False
    """Whether engines of any tensor-parallel size load each other's blocks, as far as the model
    allows it. Their sums differ in the last bits, and so may tokens that are nearly as likely."""
    gds: Gds = Gds.AUTO
    """Whether blocks go from a local disk straight into GPU memory (GPUDirect Storage)."""
    mover: MoverSettings = MoverSettings()
    """How bytes are moved between the tiers."""
    prefetch: PrefetchSettings = PrefetchSettings()
    """What is brought into CPU memory before anybody asks for it."""
    retain: RetainSettings = RetainSettings()
    """What is kept because a request, a hint or `kvtier pin` asked for it."""
    misses: Misses = Misses.EXPLAIN
    """Whether an engine explains why requests find less than their prompts."""
    tiers: tuple[TierSettings, ...]
    """The tiers, in the order in which they are asked; the first must be host memory."""


def check_engine(name: str) -> None:
    """Raise ConfigError if an engine cannot be called this: the files of private media are."""
    if not _ENGINE.fullmatch(name):
        remedy = "write letters, digits, dots, dashes and underscores, a letter or digit first"
        raise ConfigError("engine", f"{name!r} can be no part of a file's name", remedy)


Source = Mapping[str, object] | Path | str
Excused = tuple[type[NotHere], ...]
"""Mistakes that do not matter to this caller, such as a folder that only another machine has."""


def load(
    source: Source,
    *,
    record_bytes: int | None = None,
    to_write: bool = True,
    here: bool = True,
) -> StackConfig:
    """Read and check a stack, from the path of a YAML file or from nested dicts.

    With `record_bytes`, the size of one stored block, capacities are checked against it too.
    Without `to_write`, for those who only look, it may lie where nothing can be written; if it is
    not used `here`, what this machine lacks is no mistake.
    Raises ConfigErrors with all that is wrong.
    """
    excused: Excused = (NotHere,)
    if here:
        excused = () if to_write else (NotWritable,)
    return _read(_document(source), record_bytes, excused)


def check(config: StackConfig, *, record_bytes: int) -> None:
    """Check a stack that was read without the size of a block, or that a program made.

    Raises ConfigErrors with all that is wrong.
    """
    document = Document()
    _check_number(len(config.tiers), "$.tiers", document)
    for settings in config.tiers[:1]:
        _check_first(backend(settings.kind), "$.tiers[0]", document)
    _check_tiers(config.tiers, record_bytes, document, ())
    document.check()


def effective(source: Source) -> dict[str, Any]:
    """What `load` reads from a source, defaults filled in, as plain values for people; it may be
    another machine's.

    Values that come from the environment stand there by the names of their variables.
    """
    document = _document(source)
    config = _read(document, None, (NotHere,))
    values = msgspec.to_builtins(config, enc_hook=show_hook)
    shown = document.as_written("$", values)
    assert isinstance(shown, dict)
    return shown


def folders(config: StackConfig) -> list[Path]:
    """Where tiers lie whose records can be read from their files as they are."""
    found = (backend(tier.kind).folder(tier) for tier in config.tiers)
    return [folder for folder in found if folder is not None]


def _document(source: Source) -> Document:
    if isinstance(source, Mapping):
        return Document.from_dict(source)
    return Document.from_file(Path(source))


def _read(document: Document, record_bytes: int | None, excused: Excused) -> StackConfig:
    tiers: list[TierSettings | None] = []
    readers = {
        "version": lambda value, place: _version(value, place, document),
        "tiers": lambda value, place: _tiers(value, place, document, tiers),
    }
    config = decode(StackConfig, document.value, "$", document, readers)
    # Whatever is wrong elsewhere: all mistakes are told in one go.
    _check_tiers(tiers, record_bytes, document, excused)
    _check_gds(document, tiers)
    document.check()
    assert config is not None
    return config


def _check_gds(document: Document, tiers: Sequence[TierSettings | None]) -> None:
    """Report a stack that requires direct reads from a local disk, and has none."""
    gds = document.value.get("gds") if isinstance(document.value, Mapping) else None
    known = [tier for tier in tiers if tier is not None]
    if gds != Gds.REQUIRE.value or len(known) < len(tiers):
        return
    if not any(backend(tier.kind).folder(tier) for tier in known):
        remedy = "add one of kind nvme, or write gds: auto"
        document.report("$.gds", "no tier lies on a local disk", remedy)


def _version(value: object, place: str, document: Document) -> object:
    if value != VERSION or isinstance(value, bool):
        newer = isinstance(value, int) and value > VERSION
        remedy = "update kvtier to read it" if newer else f"write version: {VERSION}"
        document.report(place, f"this kvtier reads version {VERSION}, not {value!r}", remedy)
    return value


def _tiers(
    value: object, place: str, document: Document, found: list[TierSettings | None]
) -> object:
    """Decode the list of tiers; in `found`, those with which something is wrong are None."""
    items = value if isinstance(value, list) else []
    if _check_number(len(items), place, document):
        for index, item in enumerate(items):
            found.append(_tier(item, f"{place}[{index}]", document, first=index == 0))
    return tuple(found)


def _check_number(number: int, place: str, document: Document) -> bool:
    """Whether a stack may have so many tiers; it is reported if not."""
    right = 0 < number <= TIERS_MAX
    if not right:
        problem = f"a stack has 1 to {TIERS_MAX} tiers"
        document.report(place, problem, "write a list: one mapping a tier, fastest first")
    return right


def _check_first(found: Backend[Any], place: str, document: Document) -> None:
    if not found.host:
        hosts = [kind for kind in kinds() if _is_host(kind)]
        document.report(
            f"{place}.kind",
            f"the first tier must be host memory, and {found.kind} is not",
            f"put a tier of kind {' or '.join(hosts)} before it",
        )


def _check_tiers(
    tiers: Sequence[TierSettings | None],
    record_bytes: int | None,
    document: Document,
    excused: Excused,
) -> None:
    """What no type can say: tiers against this machine, and against each other."""
    owners: dict[str, str] = {}
    folders: dict[Path, str] = {}
    for index, settings in enumerate(tiers):
        if settings is None:
            continue
        place = f"$.tiers[{index}]"
        where = place + (".path" if hasattr(settings, "path") else "")
        found = backend(settings.kind)
        for name in ("load_deadline", "store_deadline"):
            if not getattr(settings, name).seconds:
                problem = "leaves no time for a single block"
                document.report(f"{place}.{name}", problem, "write some seconds, like 10s")
        try:
            _check_tier(found, settings, place, record_bytes, document, excused)
            if _wrong_fields(settings, place, document):
                continue  # it would name another place than it is meant to
            identity, folder = found.identity(settings), found.folder(settings)
        except OSError as error:
            if excused:  # who looks is told by the tier, and of the others even so
                continue
            name = f"{error.filename}: " if error.filename else ""
            document.report(where, f"{name}{error.strerror}", "name one that you may use")
        else:
            if identity is not None and owners.setdefault(identity, place) != place:
                document.report(
                    where,
                    f"{owners[identity]} uses {identity} too",
                    "give each tier a place of its own",
                )
            if folder is not None:
                folders[folder.resolve()] = place
    _check_nested(owners, folders, document)


def _check_tier(
    found: Backend[Any],
    settings: TierSettings,
    place: str,
    record_bytes: int | None,
    document: Document,
    excused: Excused,
) -> None:
    """Report all that a tier's own check refuses: a field that it has refused, or that could not be
    read, gets its default, so that the check goes on to the next one."""
    while True:
        wrong = _wrong_fields(settings, place, document)
        try:
            with contextlib.suppress(*excused):
                found.check(settings, record_bytes)
            return
        except ConfigErrors as error:
            errors = error.errors
        except ConfigError as error:
            errors = (error,)
        for each in errors:
            if each.place.split(".")[1] not in wrong:
                document.report(place + each.place, each.problem, each.remedy)
        fresh = _wrong_fields(settings, place, document) - wrong
        defaults = _defaults(settings)
        if not fresh or not fresh <= defaults.keys():
            return
        settings = msgspec.structs.replace(settings, **{name: defaults[name] for name in fresh})


def _wrong_fields(settings: TierSettings, place: str, document: Document) -> set[str]:
    """The fields of a tier of which something was reported."""
    names = {each.encode_name: each.name for each in msgspec.structs.fields(settings)}
    places = [each.place.removeprefix(place) for each in document.problems]
    parts = [re.split(r"[.\[]", each)[1:2] for each in places if each[:1] == "."]
    return {names[name] for (name,) in parts if name in names}


def _defaults(settings: TierSettings | type[TierSettings]) -> dict[str, object]:
    """What stands in for fields that are wrong, while the others are looked at."""
    defaults: dict[str, object] = {"capacity": Capacity(share=1.0)}
    for field in msgspec.structs.fields(settings):
        if field.default_factory is not msgspec.NODEFAULT:
            defaults[field.name] = field.default_factory()
        elif field.default is not msgspec.NODEFAULT:
            defaults[field.name] = field.default
    return defaults


def _check_nested(owners: dict[str, str], folders: dict[Path, str], document: Document) -> None:
    """All that lies in a tier's folder counts against its capacity, and soon leaves it no room."""
    for identity, place in owners.items():
        for folder in set(Path(identity).parents) & set(folders):
            document.report(
                place,
                f"{identity} lies in {folder}, where all counts as {folders[folder]}'s",
                f"name one outside of {folder}",
            )


def _tier(value: object, place: str, document: Document, *, first: bool) -> TierSettings | None:
    if not isinstance(value, Mapping):
        document.report(place, "a tier is a mapping", "write kind, capacity and so on under it")
        return None
    if "kind" not in value:
        document.report(place, 'lacks "kind"', f"add it: one of {', '.join(kinds())}")
        return None
    found = _backend(value["kind"], f"{place}.kind", document)
    if found is None:
        return None
    if first:
        _check_first(found, place, document)
    settings: TierSettings | None = decode(found.settings, value, place, document)
    if settings is None:
        settings = _without_wrong_fields(found.settings, value, place, document)
    if first and settings is not None and settings.write is WritePolicy.ON_EVICT:
        problem = "no tier stands above the first one"
        document.report(f"{place}.write", problem, "write through, or never")
    return settings


def _without_wrong_fields(
    kind: type[TierSettings], value: Mapping[str, object], place: str, document: Document
) -> TierSettings | None:
    """What can be read of a tier, with defaults in place of the rest, for the checks to go on with;
    None if a field without a default is wrong."""
    reported = len(document.problems)
    places = {each.place for each in document.problems}
    right = {
        key: part
        for key, part in value.items()
        if not any(
            each == at(place, key) or each.startswith(f"{at(place, key)}.") for each in places
        )
    }
    settings = decode(kind, {"capacity": "100%"} | right, place, document)
    del document.problems[reported:]
    return settings


def _backend(kind: object, place: str, document: Document) -> Backend[Any] | None:
    if not isinstance(kind, str) or kind not in kinds():
        remedy = f"{suggest(kind, kinds())} installed are {', '.join(kinds())}".strip()
        document.report(place, f"there is no tier kind {kind!r}", remedy)
        return None
    try:
        return backend(kind)
    except BackendError as error:
        problem, _, remedy = str(error).rpartition("; ")
        document.report(place, problem, remedy)
        return None


def _is_host(kind: str) -> bool:
    try:
        return backend(kind).host
    except BackendError:
        return False


_RANKS = ("tensor_parallel", "pipeline_parallel")
_MODEL = ("model", "model_config", "dtype", "quantization", "kv_dtype")
_TEXT_MAX = 1000


def rates_folder(config: StackConfig) -> Path | None:
    """The folder; None if nothing is to be kept, or no home is known."""
    if not config.rates.keep:
        return None
    named = config.rates.path if config.rates.path != "auto" else ""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # which counts for nothing, says its specification
        state = Path("~/.local/state")
    try:
        return Path(named or state / "kvtier" / "rates").expanduser()
    except RuntimeError:  # nobody knows a home
        return None


def stack_of(config: StackConfig) -> str:
    """The kinds of its tiers, and a digest of where they are."""
    places = [f"{each.kind} {backend(each.kind).identity(each)}" for each in config.tiers]
    digest = hashlib.sha256("\n".join(places).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{', '.join(each.kind for each in config.tiers)} ({digest})"


def rate_owner(config: StackConfig, facts: Mapping[str, str], ranks: int = 1) -> Owner:
    """Whose the rates of an engine are whose namespace has these facts, with so many ranks."""
    device = [facts.get("platform", "a device")]
    ranked = {name: facts.get(name, "1").replace(ANY_DEGREE, str(ranks)) for name in _RANKS}
    device += [f"{name} {count}" for name, count in ranked.items() if count != "1"]
    model = [facts[name] for name in _MODEL if name in facts]
    return Owner(
        platform.node(), " ".join(device)[:_TEXT_MAX], " ".join(model)[:_TEXT_MAX], stack_of(config)
    )
