"""`kvtier copy`, and the two names of its everyday uses: `kvtier prewarm` and `kvtier snapshot`.

A copy reads the blocks of some tiers and fills one other tier with them, namespace by namespace.
Nothing is copied twice, and every block is proved when it is read, and again when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.inspect import (
    Inspectors,
    find_namespace,
    inspector_of,
    known_namespaces,
    look,
    parts_of,
    say_two_names,
    troubles_of,
)
from kvtier.cli.sink import Choice, ChoiceReader, Copied, RateLimit, choose, open_sink
from kvtier.config import StackConfig, load
from kvtier.errors import BackendError, ConfigError, KVTierError, NotWritable
from kvtier.inspect import Depth, Filling, Reach
from kvtier.interfaces.backend import backend, kinds
from kvtier.settings import TierSettings
from kvtier.types import BlockKey, Namespace
from kvtier.vllm.identity.prompts import Prompt, Prompts, chunk_keys, chunk_tokens, read_prompts

app = options.new_app()

_FILL_SHARE = 0.95
"""Of a tier's capacity: beyond it, the last blocks would push out the first."""
_STORE = 1
"""A store that a url names is this tier of a stack that has no other."""

IntoOption = Annotated[
    str | None,
    typer.Option("--into", metavar="TIER", help="The tier to fill; else the first on a disk."),
]


class Wanted(msgspec.Struct):
    """Which blocks are to be copied, and how fast."""

    namespace: str | None
    size: int | None
    hottest: bool
    rate: int | None
    prompts: Path | None = None
    model: str | None = None


@app.command(
    name="copy",
    epilog="Examples: kvtier copy stack.yaml s3://bucket/kv; kvtier copy s3://bucket/kv "
    "stack.yaml --rate 1GB/s; kvtier copy old.yaml new.yaml --size 20GiB; "
    "kvtier copy stack.yaml file:///mnt/usb/kv --namespace 3f2a",
)
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A stack file, or a store's url.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="A stack file, or a store's url.")],
    tier: Annotated[
        str | None,
        typer.Option("--tier", "-t", metavar="TIER", help="Only this tier of FROM."),
    ] = None,
    into: IntoOption = None,
    prompts: options.PromptsOption = None,
    model: options.ModelOption = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy blocks from a stack or a store into a tier of a stack, or into a store, the newest
    first.

    A stack that is copied into itself gives what the tiers below the filled one hold; one that is
    copied to a store, what its memory and disks hold. A store that is named is listed, to find what
    was stored there by a command that was cut off. Engines may run on both sides: they do not
    notice, or find the blocks at once. Nothing is copied twice, so you can interrupt it and run it
    again. Exit code 1 if something could not be copied, or if a store that is named has nothing.
    """
    options.only_with("--prompts", prompts, model=model)
    wanted = Wanted(namespace, size, hottest, rate, prompts, model)
    _copy(source, target, wanted, tier=tier, into=into, as_json=json)


@app.command(
    epilog="Examples: kvtier prewarm -c stack.yaml --prompts p.jsonl --model ./model; "
    "kvtier prewarm -c stack.yaml --from other.yaml --size 20GiB --rate 500MB/s; "
    "kvtier prewarm -c stack.yaml --from s3://bucket/kv"
)
def prewarm(
    config: options.ConfigOption,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FROM",
            help="Another stack, or a store's url; else the tiers further down.",
        ),
    ] = None,
    into: IntoOption = None,
    prompts: options.PromptsOption = None,
    model: options.ModelOption = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy blocks into a tier before the first request asks for them: kvtier copy FROM stack.yaml.

    Without --from, the tiers below the filled one give what they hold. With prompts it says how
    many of their blocks the source lacks, and for which namespaces keys cannot be computed. Exit
    code 1 if something could not be copied.
    """
    options.only_with("--prompts", prompts, model=model)
    wanted = Wanted(namespace, size, hottest, rate, prompts, model)
    _copy(str(config) if source is None else source, str(config), wanted, into=into, as_json=json)


@app.command(
    epilog="Examples: kvtier snapshot -c stack.yaml --to s3://bucket/kv; "
    "kvtier snapshot -c stack.yaml --size 50GiB"
)
def snapshot(
    config: options.ConfigOption,
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TO",
            help="A store's url, or a stack that has a store; else this stack's own.",
        ),
    ] = None,
    namespace: options.NamespaceOption = None,
    size: options.SizeOption = None,
    hottest: options.HottestOption = False,
    rate: options.RateOption = None,
    json: options.JsonOption = False,
) -> None:
    """Copy what memory and disks hold to an object store: kvtier copy stack.yaml TO.

    The stack may be in use: a running engine does not notice. Exit code 1 if something could not be
    copied.
    """
    wanted = Wanted(namespace, size, hottest, rate)
    to_store = str(config) if target is None else target
    _copy(str(config), to_store, wanted, to_its_store=True, as_json=json)


def _copy(
    source: str,
    target: str,
    wanted: Wanted,
    *,
    tier: str | None = None,
    into: str | None = None,
    to_its_store: bool = False,
    as_json: bool,
) -> None:
    """Copy from one place to another, and say what came of it."""
    origin, goal = _places(source, target)
    to_store = goal.tier is not None or to_its_store
    if goal.tier is None:
        goal = goal._replace(tier=_store_of(goal) if to_its_store else _tier_to_fill(goal, into))
    elif into is not None:
        raise typer.BadParameter("a url names its tier: leave it out", param_hint="--into")
    tiers = _tiers_to_read(origin, goal, tier, to_store=to_store)
    _check_apart(origin, goal)
    uses_of = (wanted.namespace or "").lower()
    inspectors = look(origin.stack, tiers, Depth.RECORDED, uses_of)
    named = origin.tier is not None or tier is not None
    if named:
        _complete(inspectors, goal, wanted, must_exist=origin.tier is not None)
    prompts = None
    if wanted.prompts is not None:
        console.note("reading the prompts")
        prompts = read_prompts(wanted.prompts, wanted.model)
    done = _Copy(origin.stack, inspectors, goal, wanted).run(prompts)
    if prompts is not None:
        prompts.say_skipped(console.warn)
    if not as_json:
        say_two_names(known_namespaces(inspectors))
    where = ", ".join(each.contents.where for each in inspectors)
    _report(done, where, troubles_of(inspectors), as_json, may_skip=prompts is not None)


# -- places ----------------------------------------------------------------------------------------


class CopyEnd(NamedTuple):
    """A stack, or one tier of it; a store's url is a tier of a stack that is made for it."""

    text: str
    stack: StackConfig
    tier: int | None

    @property
    def settings(self) -> TierSettings:
        """Those of the one tier."""
        assert self.tier is not None
        return self.stack.tiers[self.tier]


def _places(source: str, target: str) -> tuple[CopyEnd, CopyEnd]:
    """Where a copy comes from, and where it goes to; raises ConfigError for what is neither a stack
    nor a store."""
    goal = _place(target, to_write=True)
    files = Path(source), Path(target)
    if source == target or (all(map(Path.is_file, files)) and files[0].samefile(files[1])):
        return goal, goal
    return _place(source, to_write=False), goal


def _place(text: str, *, to_write: bool) -> CopyEnd:
    if "://" in text:
        return _store_at(text, to_write=to_write)
    if Path(text).is_dir():
        raise ConfigError(text, "is a folder", f"write {Path(text).resolve().as_uri()}")
    if not (Path(text).exists() or text.endswith((".yaml", ".yml"))):
        remedy = "write s3://bucket/prefix or file:///folder, or name a stack file"
        raise ConfigError(text, "neither a url nor a stack file", remedy)
    return CopyEnd(text, load(Path(text), to_write=to_write), None)


def _store_at(url: str, *, to_write: bool) -> CopyEnd:
    settings = _settings_at(url)
    shown = "this url" if re.search("[@?]", url) else url  # a password, a signature
    try:
        backend(settings.kind).check(settings, None)
    except ConfigError as error:
        if to_write or not isinstance(error, NotWritable):
            raise ConfigError(shown, error.problem, error.remedy) from error
    # The first tier of a stack is host memory, which private files are named by: it has none here.
    place = CopyEnd(shown, StackConfig(version=1, tiers=(settings, settings)), _STORE)
    folder = inspector_of(place.stack, _STORE).folder()
    if not to_write and folder is not None and not folder.exists():
        raise ConfigError(url, "there is no such folder", "name one that holds blocks")
    return place


def _settings_at(url: str) -> TierSettings:
    """The store at a url, of the kind of another package that takes it, or of a built-in one."""
    ours = kinds(built_in=True)
    for kind in [*(each for each in kinds() if each not in ours), *ours]:
        with suppress(BackendError):  # a package that is broken is none of this command's
            settings: TierSettings | None = backend(kind).at_url(url)
            if settings is not None:
                return settings
    raise ConfigError(url, "no kind of tier takes this url", "name a store, like s3://bucket/kv")


def _tiers_with(stack: StackConfig, *reach: Reach) -> list[int]:
    """The tiers whose medium is host memory, a disk of this machine, or a store, as asked."""
    every = range(len(stack.tiers))
    return [tier for tier in every if inspector_of(stack, tier).reach in reach]


def _tier_to_fill(goal: CopyEnd, into: str | None) -> int:
    """The tier that an option names, or the first one on a disk of this machine."""
    tier = options.tier_of(into, goal.stack, "--into")
    if tier is None:
        disks = _tiers_with(goal.stack, Reach.MACHINE)
        if not disks:
            raise KVTierError("this stack has no nvme tier to fill: name one with --into")
        tier = disks[0]
    inspector = inspector_of(goal.stack, tier)
    if not inspector.filling().keeps():
        raise KVTierError(
            f"tier {tier} ({inspector.kind}) keeps nothing when a process ends, and so nothing of "
            "what this one copies: name another with --into, or set its persistence: keep"
        )
    return tier


def _store_of(goal: CopyEnd) -> int:
    """The one store of a stack."""
    stores = _tiers_with(goal.stack, Reach.SHARED)
    if len(stores) != 1:
        count = f"{len(stores)} object tiers" if stores else "no object tier"
        raise KVTierError(f"{goal.text} has {count}: name a url, like s3://bucket/prefix")
    return stores[0]


def _tiers_to_read(
    origin: CopyEnd, goal: CopyEnd, named: str | None, *, to_store: bool
) -> list[int]:
    """The tiers of a place that a copy reads; to a store it takes what this machine would lose."""
    assert goal.tier is not None
    if origin.tier is not None:
        if named is not None:
            raise typer.BadParameter("a url names its tier: leave it out", param_hint="--tier")
        return [origin.tier]
    chosen = options.tier_of(named, origin.stack)
    same = origin.stack is goal.stack
    if chosen is not None:
        if same and chosen == goal.tier:
            raise typer.BadParameter("that is the tier that is filled", param_hint="--tier")
        return [chosen]
    if to_store or (same and inspector_of(goal.stack, goal.tier).reach is Reach.SHARED):
        return _tiers_with(origin.stack, Reach.HOST, Reach.MACHINE)
    if not same:
        return list(range(len(origin.stack.tiers)))
    if goal.tier + 1 == len(goal.stack.tiers):
        raise KVTierError("there is no tier further down: name another stack to copy from")
    return list(range(goal.tier + 1, len(goal.stack.tiers)))


def _check_apart(origin: CopyEnd, goal: CopyEnd) -> None:
    """Objects in a disk tier's folder would count there, and lose what describes them to `clear`;
    raises ConfigError."""
    where = str(backend(goal.settings.kind).identity(goal.settings))
    if origin.tier is not None:
        if where == str(backend(origin.settings.kind).identity(origin.settings)):
            raise ConfigError(goal.text, "is where the copy comes from", "name another")
        return
    if inspector_of(goal.stack, goal.tier or 0).reach is not Reach.SHARED:
        return
    for tier in _tiers_with(origin.stack, Reach.HOST, Reach.MACHINE):
        settings = origin.stack.tiers[tier]
        home = backend(settings.kind).identity(settings)
        if home and Path(where).is_relative_to(home):
            kept = f"lies where tier {tier} ({settings.kind}) keeps its blocks"
            raise ConfigError(where, kept, "name another")


def _complete(inspectors: Inspectors, goal: CopyEnd, wanted: Wanted, *, must_exist: bool) -> None:
    """Have a store that was named listed: blocks of a command that was cut off are written down
    nowhere. Raises KVTierError if there is nothing where there must be something."""
    for each in inspectors:
        if each.reach is not Reach.SHARED:
            continue
        found = each.contents
        if found.troubles and not found.parts:
            raise KVTierError(found.troubles[0])
        each.complete((wanted.namespace or "").lower(), _room_in(goal, wanted.size))
        if must_exist and not any(part.blocks for part in found.parts):
            raise KVTierError(
                f"there are no blocks in {found.where}: see that it is the right place"
            )


def _room_in(goal: CopyEnd, size: int | None) -> int:
    """How many bytes may be copied into a tier, at most so many."""
    assert goal.tier is not None
    most = int(inspector_of(goal.stack, goal.tier).capacity() * _FILL_SHARE)
    return most if size is None else min(most, size)


# -- the copy --------------------------------------------------------------------------------------


class _Copy:
    """A tier that is filled with what others hold, one namespace after the other."""

    def __init__(
        self, stack: StackConfig, inspectors: Inspectors, goal: CopyEnd, wanted: Wanted
    ) -> None:
        assert goal.tier is not None
        self._stack = stack
        self._inspectors = inspectors
        self._wanted = wanted
        self._filling: Filling[Any] = inspector_of(goal.stack, goal.tier).filling()
        self._pace = RateLimit(wanted.rate)
        self._asked_left = _room_in(goal, wanted.size)
        """How many bytes may still be copied: of what was asked for, and of what the tier has."""
        self._tier_left = _room_in(goal, None)
        self._some_asked = False

    def run(self, prompts: Prompts | None) -> list[Copied]:
        """Copy everything, or what these prompts would ask for. Of several namespaces those are
        skipped of which that cannot be told, or that the tier does not take."""
        names = self._namespaces()
        if len(names) > 1 and self._filling.one_namespace:
            raise KVTierError(
                f"{len(names)} namespaces here, and {self._filling.one_namespace} holds one: name "
                "it with --namespace"
            )
        done: list[Copied] = []
        with ExitStack() as spared:
            for name in names:
                result = Copied(name)
                done.append(result)
                try:
                    namespace = self._description(name)
                    keys = None if prompts is None else _keys_of(prompts.known, namespace)
                except KVTierError as error:
                    if self._wanted.namespace is not None:
                        raise
                    result.skipped = str(error)
                    continue
                choice = self._choose(namespace, keys, result)
                if not choice:
                    continue
                try:
                    self._fill(choice, namespace, result)
                except KVTierError as error:  # its folder may be another user's, the next one not
                    if len(names) == 1:
                        raise
                    result.skipped = str(error)
                    continue
                self._take_room(choice, namespace)
                if name != names[-1]:
                    keys_of_choice = partial(_all_keys, choice)
                    spared.enter_context(self._filling.protect(namespace, keys_of_choice))
        return done

    def _namespaces(self) -> list[str]:
        """The one that is named, or all that have blocks, the one to which a block came last first:
        there may not be room for all."""
        if self._wanted.namespace is not None:
            return [find_namespace(self._inspectors, self._wanted.namespace)]
        newest: dict[str, float] = {}
        for part in (part for part in parts_of(self._inspectors) if part.blocks):
            newest[part.namespace] = max(part.newest or 0.0, newest.get(part.namespace, 0.0))
        return sorted(newest, key=lambda name: (-newest[name], name))

    def _description(self, name: str) -> Namespace:
        """What a namespace means, from these tiers or another one of their stack: it does not lie
        beside the blocks in host memory. Raises KVTierError where nothing says it."""
        inspectors = list(self._inspectors)
        if name not in known_namespaces(inspectors):
            seen = {each.tier for each in inspectors}
            others = [tier for tier in range(len(self._stack.tiers)) if tier not in seen]
            inspectors += look(self._stack, others, Depth.RECORDED, name)
        if found := known_namespaces(inspectors).get(name):
            return found
        if troubles := troubles_of(inspectors):
            raise KVTierError(troubles[0])
        raise KVTierError(
            f"nothing in this stack says what the namespace {name} means: its namespace.json lies "
            "beside the blocks on a disk or in a store, and there is none"
        )

    def _choose(self, namespace: Namespace, keys: set[BlockKey] | None, result: Copied) -> Choice:
        """The blocks of a namespace for which there is room. Where nothing was asked for before,
        raises KVTierError if that is none."""
        choice = choose(self._inspectors, namespace.id, hottest=self._wanted.hottest)
        if keys is not None:
            choice = choice.only(keys)
            result.missing = len(keys) - len(choice)
        sizes = self._filling.block_bytes(namespace)
        allowed = min(self._asked_left, self._tier_left)
        cut = choice.cut(allowed, sizes)
        if len(choice) and not len(cut) and not self._some_asked:
            takes = amounts.size(int(choice.room(sizes)[0]))
            raise KVTierError(
                f"{amounts.size(allowed)} hold not one block, which takes {takes}: allow more by "
                "--size or the tier's capacity"
            )
        self._some_asked = self._some_asked or len(cut) > 0
        result.asked = len(cut)
        result.left = len(choice) - len(cut)
        return cut

    def _fill(self, choice: Choice, namespace: Namespace, result: Copied) -> None:
        reader = ChoiceReader(choice, namespace)
        with (
            open_sink(self._filling, namespace, reader, self._pace) as sink,
            console.progress("copying", len(choice), "blocks") as bar,
        ):
            sink.fill(choice.pieces(sink.piece), result, bar)
            sink.carry_uses(choice.used())
        sink.check(result)

    def _take_room(self, choice: Choice, namespace: Namespace) -> None:
        """These are there now."""
        sizes = self._filling.block_bytes(namespace)
        size = int(choice.room(sizes).sum())
        self._asked_left -= size
        self._tier_left -= self._filling.taken(len(choice), size, sizes)


def _keys_of(prompts: Sequence[Prompt], namespace: Namespace) -> set[BlockKey]:
    """All keys that these prompts would ask for; raises KVTierError as `chunk_keys`."""
    chunk_tokens(namespace)
    chunks = (keys for prompt in prompts for keys in chunk_keys(prompt, namespace))
    return {key for keys in chunks for key in keys}


def _all_keys(choice: Choice) -> set[BlockKey]:
    return set(choice.keys(0, len(choice)))


# -- what came of it -------------------------------------------------------------------------------


def _report(
    done: Sequence[Copied],
    source: str,
    troubles: Sequence[str],
    json: bool,
    *,
    may_skip: bool = False,
) -> None:
    """Say what was copied; ends with a failure if something is missing. `source` is where it was.
    `may_skip`: it is none to skip a namespace of which nothing was asked for, unless there is no
    other."""
    skipped = [each for each in done if each.skipped]
    rest = [each for each in done if not each.skipped]
    excused = [each for each in skipped if rest and may_skip and not each.asked]
    ok = not troubles and all(each.whole or each in excused for each in done)
    if json:
        console.print_json({"ok": ok, "namespaces": done, "troubles": troubles})
    elif not done and not troubles:
        console.say(f"there is nothing to copy: nothing in {source} tells of blocks")
    elif rest:
        _show(rest)
    for each in skipped:
        console.warn(f"namespace {each.namespace[:12]} is skipped: {each.skipped}")
    if untold := sum(each.untold for each in done):
        console.warn(
            f"{untold} blocks are not written down in the store, because that failed: they may be "
            "there, but only a listing would find them; run it again once the store is well"
        )
    if any(each.full for each in done):
        console.warn(
            "the tier had no room for the rest: it is full, its disk is (free_floor counts), its "
            "store went away, or an engine that runs there holds it - kvtier doctor and kvtier du "
            "say which; give it more room, stop the engine meanwhile, or copy less with --size"
        )
    elif gone := [each for each in rest if each.all_gone]:
        asked = sum(each.asked for each in gone)
        console.warn(f"all {asked} blocks are gone that the source says it has: see kvtier verify")
    elif not all(each.whole for each in rest) and not untold:
        console.warn("some blocks are missing: run it again, or see kvtier verify and kvtier du")
    for trouble in troubles:
        console.warn(trouble)
    if troubles or not ok:
        raise typer.Exit(console.EXIT_FAILURE)


def _show(done: Sequence[Copied]) -> None:
    """One line, and a table where something went wrong."""
    copied, asked = sum(each.copied for each in done), sum(each.asked for each in done)
    said = f"{copied} of {asked} blocks copied"
    if there := sum(each.already_there for each in done):
        said += f", {there} were there already"
    if moved := sum(each.bytes for each in done):
        seconds = sum(each.seconds for each in done)
        said += f", {amounts.size(moved)} in {amounts.duration(seconds)}"
        said += f", {amounts.rate(moved / seconds)}"
    console.say_wrapped(said)
    if not all(each.whole for each in done):
        columns = ["namespace", "asked", "there", "copied", "bad", "unread", "gone", "not stored"]
        rows = [
            [
                each.namespace[:12],
                each.asked,
                each.already_there,
                each.copied,
                each.bad,
                each.unread,
                each.gone,
                each.not_stored,
            ]
            for each in done
        ]
        console.print_table(columns, rows, numbers=columns[1:])
    if left := sum(each.left for each in done):
        console.say(f"{left} blocks are left out: beyond --size, or 95 % of the tier's capacity")
    if missing := sum(each.missing for each in done):
        console.say(f"{missing} blocks that the prompts ask for are not in the source")
