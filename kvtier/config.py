"""A stack's configuration: one YAML file, or nested dicts, decoded once into types.

`load` answers a `StackConfig` that works on this machine, as far as that can be known without
opening it, or raises `ConfigErrors` with everything that is wrong, each with its place.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvtier.core.decode import decode
from kvtier.core.document import Document
from kvtier.core.interfaces.backend import Backend, backend, kinds
from kvtier.core.settings import Count, Gds, TierSettings, WritePolicy
from kvtier.core.values import show_hook
from kvtier.errors import BackendError, ConfigError, ConfigErrors, NotHere, NotWritable

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


class Loads(enum.Enum):
    """Which hits are loaded."""

    WORTHWHILE = "worthwhile"
    """Those that cost less to load than to recompute, by recent speeds."""
    ALWAYS = "always"
    """All of them."""


class Sleep(enum.Enum):
    """What becomes of stored blocks when an engine sleeps, or pauses and clears its caches."""

    FORGET = "forget"
    """They go, in all tiers: other weights may be read meanwhile in ways that kvtier cannot see."""
    KEEP = "keep"
    """They are found again: for engines whose weights are changed only by vLLM's own calls for
    that, and by others whose names say so."""


class StackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one file says: the tiers of a stack, fastest first, and what they share."""

    version: Literal[1]
    """The version of this format."""
    name: Name = "default"
    """The name of this engine on its machine: each name has CPU memory of its own."""
    chunk_tokens: Count = 256
    """How many tokens one stored block covers: a multiple of the engine's own block size. Models
    with a shorter window, or with states, take fewer."""
    loads: Loads = Loads.WORTHWHILE
    """Which hits an engine loads: those that cost less than recomputing them, or all."""
    sleep: Sleep = Sleep.FORGET
    """Whether an engine that has slept finds its stored blocks again when it wakes up."""
    gds: Gds = Gds.AUTO
    """Whether blocks go from a local disk straight into GPU memory (GPUDirect Storage)."""
    mover: MoverSettings = MoverSettings()
    """How bytes are moved between the tiers."""
    tiers: tuple[TierSettings, ...]
    """The tiers, in the order in which they are asked; the first must be host memory."""


Source = Mapping[str, object] | Path | str
Excused = tuple[type[NotHere], ...]
"""Mistakes that are none to this caller, such as folders that another machine has."""


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
    """Check a stack that was read without the size of a block, or was not read but made.

    Raises ConfigErrors with all that is wrong.
    """
    document = Document()
    if not 0 < len(config.tiers) <= TIERS_MAX:
        _miscounted("$.tiers", document)
    for settings in config.tiers[:1]:
        _check_host(backend(settings.kind), "$.tiers[0]", document)
    _check(config.tiers, record_bytes, document, ())
    document.check()


def check_engine(name: str) -> None:
    """Raise ConfigError if an engine cannot be called this: the files of private media are."""
    if not _ENGINE.fullmatch(name):
        remedy = "write letters, digits, dots, dashes and underscores, a letter or digit first"
        raise ConfigError("engine", f"{name!r} can be no part of a file's name", remedy)


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
    _check(tiers, record_bytes, document, excused)
    if config is not None and config.gds is Gds.REQUIRE and not folders(config):
        document.report(
            "$.gds", "no tier lies on a local disk", "add one of kind nvme, or write gds: auto"
        )
    document.check()
    assert config is not None
    return config


def _version(value: object, place: str, document: Document) -> object:
    if value != VERSION or isinstance(value, bool):
        newer = isinstance(value, int) and value > VERSION
        remedy = "update kvtier to read it" if newer else f"write version: {VERSION}"
        document.report(place, f"this kvtier reads version {VERSION}, not {value!r}", remedy)
    return value


def _tiers(
    value: object, place: str, document: Document, found: list[TierSettings | None]
) -> object:
    if not isinstance(value, list) or not 0 < len(value) <= TIERS_MAX:
        _miscounted(place, document)
        return None
    for index, item in enumerate(value):
        found.append(_tier(item, f"{place}[{index}]", document, host=index == 0))
    return tuple(found)


def _miscounted(place: str, document: Document) -> None:
    document.report(
        place,
        f"a stack has 1 to {TIERS_MAX} tiers",
        "write a list: one mapping a tier, fastest first",
    )


def _tier(value: object, place: str, document: Document, *, host: bool) -> TierSettings | None:
    if not isinstance(value, Mapping):
        document.report(place, "a tier is a mapping", "write kind, capacity and so on under it")
        return None
    if "kind" not in value:
        document.report(place, 'lacks "kind"', f"add it: one of {', '.join(kinds())}")
        return None
    found = _backend(value["kind"], f"{place}.kind", document)
    if found is None:
        return None
    if host:
        _check_host(found, place, document)
    settings: TierSettings | None = decode(found.settings, value, place, document)
    if host and settings is not None and settings.write is WritePolicy.ON_EVICT:
        document.report(
            f"{place}.write", "no tier stands above the first one", "write through, or never"
        )
    return settings


def _check_host(found: Backend[Any], place: str, document: Document) -> None:
    if not found.host:
        hosts = [kind for kind in kinds() if _is_host(kind)]
        document.report(
            f"{place}.kind",
            f"the first tier must be host memory, and {found.kind} is not",
            f"put a tier of kind {' or '.join(hosts)} before it",
        )


def _backend(kind: object, place: str, document: Document) -> Backend[Any] | None:
    if not isinstance(kind, str) or kind not in kinds():
        near = get_close_matches(str(kind), kinds(), n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        document.report(
            place, f"there is no tier kind {kind!r}", f"{hint}installed are {', '.join(kinds())}"
        )
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


def _check(
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
            with contextlib.suppress(*excused):
                found.check(settings, record_bytes)
            identity = found.identity(settings)
        except ConfigErrors as error:
            for each in error.errors:
                document.report(place + each.place, each.problem, each.remedy)
        except ConfigError as error:
            document.report(place + error.place, error.problem, error.remedy)
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
            if (folder := found.folder(settings)) is not None:
                folders[folder.resolve()] = place
    _check_nested(owners, folders, document)


def _check_nested(owners: dict[str, str], folders: dict[Path, str], document: Document) -> None:
    """All that lies in a tier's folder counts against its capacity, and soon leaves it no room."""
    for identity, place in owners.items():
        for folder in set(Path(identity).parents) & set(folders):
            document.report(
                place,
                f"{identity} lies in {folder}, where all counts as {folders[folder]}'s",
                f"name one outside of {folder}",
            )
