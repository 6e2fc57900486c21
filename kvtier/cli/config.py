"""`kvtier config`: check, show and start stack files."""

from __future__ import annotations

import json as json_text
import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.backends.object.settings import parse_url
from kvtier.backends.object.stores.errors import WrongEndpoint
from kvtier.cli import console, options
from kvtier.cli.inspect import unusable_here
from kvtier.cli.migrate import migrate
from kvtier.config import Name, StackConfig, effective, load
from kvtier.config.schema import json_schema
from kvtier.errors import ConfigError, ConfigErrors, KVTierError, naming
from kvtier.interfaces.backend import kinds
from kvtier.settings import ByteSize, Capacity
from kvtier.system.disk import Disk
from kvtier.system.memory import memory_given

app = options.new_app()

_SHARED_MEMORY = Path("/dev/shm")
_GIB = 1 << 30
_MIB = 1 << 20
_File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="The stack: a YAML file.", show_default=False)
]
_Config = Annotated[
    Path | None,
    typer.Option(
        *("--config", "-c"),
        envvar="KVTIER_CONFIG",
        metavar="FILE",
        help="The same as FILE, in the way of all other commands.",
    ),
]
_BuiltIn = Annotated[
    bool, typer.Option("--built-in", hidden=True, help="Only the tier kinds that come with kvtier.")
]


@app.command(
    short_help="Say what is wrong with a stack, and where.",
    epilog="Example: kvtier config check configs/laptop.yaml --block-size 1MiB",
)
def check(
    context: typer.Context,
    file: _File = None,
    config: _Config = None,
    block_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Check capacities against one block of this size."),
    ] = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere", help="For a file of another machine: do not check for room here."
        ),
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """List everything that is wrong with a stack, each with its place in the file; exit code 2 if
    anything is.

    What may be right for another user, like the name of an AWS profile, is only a warning.
    """
    record_bytes = None if block_size is None else _block(block_size, "--block-size")
    path = _named(context, file, config)
    errors: tuple[ConfigError, ...] = ()
    warnings: list[ConfigError] = []
    try:
        stack = load(path, record_bytes=record_bytes, here=not elsewhere)
        warnings = [] if elsewhere else _warnings(path, stack)
    except ConfigErrors as found:
        if not json:
            raise
        errors = found.errors
    if json:
        rows = {"errors": [*map(_row, errors)], "warnings": [*map(_row, warnings)]}
        console.print_json({"ok": not errors, **rows})
    else:
        chain = " -> ".join(settings.kind for settings in stack.tiers)
        but = ", but for this user" if warnings else ""
        console.say(f"{path}: all is well ({chain}){but}")
        for each in warnings:
            console.warn(f"{each}; until then no engine of this user's starts with it")
    if errors:
        raise typer.Exit(console.EXIT_USAGE)


def _named(context: typer.Context, file: Path | None, config: Path | None) -> Path:
    """The stack that was named, in one way or the other; what is written goes before what the
    environment says."""
    if file is None:
        if config is None:
            raise typer.BadParameter("name a stack file, or set KVTIER_CONFIG", param_hint="FILE")
        return config
    source = context.get_parameter_source("config")
    if config is not None and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("there is a FILE, too: name one", param_hint="--config")
    return file


def _warnings(file: Path, config: StackConfig) -> list[ConfigError]:
    return [
        ConfigError(each.place, each.problem, each.remedy, str(file))
        for each in unusable_here(config)
    ]


@app.command(
    short_help="Print what a stack comes to, with its defaults.",
    epilog="Example: kvtier config show configs/laptop.yaml",
)
def show(
    context: typer.Context,
    file: _File = None,
    config: _Config = None,
    json: options.JsonOption = False,
) -> None:
    """Print a stack with all its defaults; values of the environment appear by name."""
    values = effective(_named(context, file, config))
    if json:
        console.print_json(values)
    else:
        import yaml

        console.say(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip())


@app.command(
    short_help="Print the JSON Schema of stack files.",
    epilog="Example: kvtier config schema > schema.json",
)
def schema(built_in: _BuiltIn = False) -> None:
    """Print the JSON Schema of stack files, with all tier kinds that are installed."""
    console.print_json(json_schema(kinds(built_in=built_in)))


@app.command(
    short_help="Write a stack file for this machine.",
    epilog="Examples: kvtier config init stack.yaml --folder /mnt/nvme/kvtier; "
    "kvtier config init stack.yaml --memory 8GiB --disk 100GiB --bucket s3://bucket/kv",
)
def init(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Where to write it; else it goes to standard output."),
    ] = None,
    folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where the NVMe tier keeps its blocks.")
    ] = "~/.cache/kvtier",
    name: Annotated[
        str | None, typer.Option(help="The engine's name; each engine of a machine needs its own.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE|P%", help="Shared memory to use; else a quarter of it."),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE|P%", help="Disk to use; else most of what is free.")
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A third tier: s3://bucket/prefix or file:///folder."),
    ] = None,
) -> None:
    """Write a commented stack file for this machine, and make the folder that it names."""
    blocks = _blocks(folder, file)
    _check_init(folder, name, bucket)
    text = starter(
        blocks,
        name=name,
        memory=None if memory is None else _capacity(memory, "--memory"),
        disk=None if disk is None else _capacity(disk, "--disk"),
        bucket=bucket,
    )
    if file is None:
        console.say(text.rstrip())
        return
    if file.exists():
        raise KVTierError(f"{file} exists; name another file, or remove it first")
    if not file.parent.is_dir():
        raise KVTierError(f"{file.parent} is not a folder; make it, or name one that exists")
    _check_sizes(text, blocks.absolute())
    blocks.mkdir(mode=0o700, parents=True, exist_ok=True)
    with naming(file):
        _write(file, text)
    named = f"./{file}" if str(file).startswith("-") else str(file)  # no option
    typed = shlex.quote(named)
    console.say(f"{file} is written; look through it, then: kvtier config check {typed}")


def _check_sizes(text: str, blocks: Path) -> None:
    """Refuse sizes with which `check` would refuse the stack on this machine."""
    import yaml

    stack = yaml.safe_load(text)
    stack["tiers"][1]["path"] = str(_nearest(blocks))  # the folder is not there yet
    try:
        load(stack)
    except ConfigErrors as found:
        options_of = {"$.tiers[0].capacity": "--memory", "$.tiers[1].capacity": "--disk"}
        for each in found.errors:
            if option := options_of.get(each.place):
                text = f"{each.problem}; {each.remedy}"
                raise typer.BadParameter(text, param_hint=option) from None


def _write(file: Path, text: str) -> None:
    """All of it, or nothing."""
    with file.open("x", encoding="utf-8") as target:
        try:
            target.write(text)
            target.flush()
        except OSError:
            file.unlink()
            raise


def _blocks(folder: str, file: Path | None) -> Path:
    """The folder that an option names."""
    try:
        blocks = Path(folder).expanduser()
    except RuntimeError:
        problem = f"there is no home that {folder} could begin with; write a whole path"
        raise typer.BadParameter(problem, param_hint="--folder") from None
    if file is not None and file.absolute() == blocks.absolute():
        raise typer.BadParameter(
            "that is the stack file itself; name another", param_hint="--folder"
        )
    if blocks.exists() and not blocks.is_dir():
        raise typer.BadParameter("that is a file; name a folder", param_hint="--folder")
    return blocks


def _check_init(folder: str, name: str | None, bucket: str | None) -> None:
    """Refuse what would make a stack that `check` refuses."""
    for option, text in (("--folder", folder), ("--bucket", bucket or "")):
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"{text} is not UTF-8, as a stack file is; name another"
            raise typer.BadParameter(problem, param_hint=option) from None
    try:
        msgspec.convert(name, Name | None)
    except msgspec.ValidationError:
        problem = f"{name!r} cannot name an engine; write letters, digits, dots and dashes"
        raise typer.BadParameter(problem, param_hint="--name") from None
    if bucket is not None:
        home = Path(folder).expanduser().resolve()
        try:
            store = parse_url(bucket).folder
        except WrongEndpoint as error:
            raise typer.BadParameter(str(error), param_hint="--bucket") from None
        if store is not None and store.resolve().is_relative_to(home):
            problem = "that is in the folder of the NVMe tier; name another"
            raise typer.BadParameter(problem, param_hint="--bucket")


def _block(text: str, option: str) -> int:
    try:
        return options.parse_block(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _capacity(text: str, option: str) -> str:
    """As it was given, in the file too."""
    try:
        if text.strip().endswith("%"):
            return str(Capacity.parse(text))
        options.parse_size(text)
    except (ValueError, typer.BadParameter) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return text.strip()


def _row(error: ConfigError) -> dict[str, str]:
    return {
        "place": error.place,
        "line": error.line,
        "problem": error.problem,
        "remedy": error.remedy,
    }


app.command(
    short_help="Print the stack that does what LMCache, or vLLM, was told.",
    context_settings={"ignore_unknown_options": True, **options.HELP},
    epilog="Examples: kvtier migrate lmcache.yaml; kvtier migrate --kv-offloading-size 64",
)(migrate)


# -- the text of a new stack file ------------------------------------------------------------------


def starter(
    folder: Path,
    *,
    name: str | None,
    memory: str | None,
    disk: str | None,
    bucket: str | None,
) -> str:
    """The text of a stack file with a CPU tier, an NVMe tier in this folder, and a bucket if one
    is named; sizes that are not given follow the machine."""
    folder = folder.expanduser().absolute()
    total, free = memory_given(), Disk().free_bytes(_nearest(folder))
    shared = Disk().free_bytes(_SHARED_MEMORY)
    text = _TEMPLATE.format(
        name='"${KVTIER_NAME:-default}"' if name is None else _quoted(name),
        memory=_round(total),
        shared=_round(shared),
        free=_round(free),
        cpu=memory or _round(min(total // 4, shared * 4 // 5)),
        nvme=disk or _round(free * 4 // 5),
        folder=_quoted(str(folder)),
    )
    return text if bucket is None else text + _BUCKET.format(url=_quoted(bucket))


def _quoted(text: str) -> str:
    """As a YAML string in which nothing is taken from the environment."""
    return json_text.dumps(text, ensure_ascii=False).replace("${", "$${")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _round(size: int) -> ByteSize:
    """Down to whole GiB, or MiB if it is less than a few of them."""
    unit = _GIB if size >= 4 * _GIB else _MIB
    return ByteSize(max(size // unit, 1) * unit)


_TEMPLATE = """\
# yaml-language-server: $schema=./schema.json
# The line above lets editors complete and check: kvtier config schema > schema.json
# All settings, with what they mean: docs/reference/configuration.md

version: 1

# Names this engine. Give each engine of one machine a name of its own, here or by the environment.
name: {name}

# How many tokens one stored block covers: a multiple of the engine's own block size.
chunk_tokens: 256

# Tiers are asked in this order. Each takes what the one before it lets go or passes on.
tiers:
  # Shared memory. This machine has {memory} of memory, and {shared} are free in /dev/shm.
  - kind: cpu
    capacity: {cpu}

  # A folder on a local disk, {free} of which are free. Several engines may share it.
  - kind: nvme
    path: {folder}
    capacity: {nvme}
    # write: on_evict          # only what the tier above lets go, which spares the disk
    # admission: second_touch  # only what was used a second time, which spares it more
"""

_BUCKET = """
  # A bucket, or a folder, that many servers share; the capacity is that of all together.
  # Credentials come from the environment, a profile or a role.
  - kind: object
    url: {url}
    capacity: 1TiB
"""
