"""Options that several commands have, and what their texts mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier.config import StackConfig


def parse_size(text: str | int) -> int:
    """The value of an option that is a size, like 64MiB."""
    from kvtier.settings import ByteSize

    try:
        size = ByteSize.parse(text).bytes
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size < 1:
        raise typer.BadParameter("a size of nothing; write at least 1")
    return size


def parse_block(text: str | int) -> int:
    """The value of an option that is the size of a block's payload, like 1MiB."""
    from kvtier.settings import ByteSize
    from kvtier.types import PAYLOAD_BYTES_MAX

    size = parse_size(text)
    if size > PAYLOAD_BYTES_MAX:
        most = ByteSize(PAYLOAD_BYTES_MAX)
        raise typer.BadParameter(f"{text!r} is more than the {most} of a block; write less")
    return size


def parse_rate(text: str) -> int:
    """The value of an option that is a rate, like 200MB/s, in bytes a second."""
    size = text.removesuffix("/s")
    try:
        if size[-1:].isalpha():  # a plain number is taken for megabytes by some, and is bytes
            return parse_size(size)
    except typer.BadParameter:
        pass
    raise typer.BadParameter(f"{text!r} is no rate; write one like 200MB/s")


def parse_duration(text: str) -> float:
    """The value of an option that is a length of time, like 30d, in seconds."""
    from kvtier.settings import Duration

    try:
        return Duration.parse(text).seconds
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


HELP = {"help_option_names": ["-h", "--help"]}


def new_app() -> typer.Typer:
    """The Typer of one command; with a single function in it, it is the command itself."""
    return typer.Typer(
        no_args_is_help=False,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=HELP,
    )


_CONFIG = typer.Option(
    "--config", "-c", envvar="KVTIER_CONFIG", metavar="FILE", help="The stack: a YAML file."
)
ConfigOption = Annotated[Path, _CONFIG]
MaybeConfigOption = Annotated[Path | None, _CONFIG]
TierOption = Annotated[
    str | None,
    typer.Option(
        "--tier", "-t", metavar="TIER", help="Only this tier: its kind, or its number from 0."
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAMESPACE",
        help="Only this namespace; its first digits will do.",
    ),
]
RateOption = Annotated[
    int | None,
    typer.Option(
        "--rate", parser=parse_rate, metavar="RATE", help="No faster than this, like 200MB/s."
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="PROMPT_FILE",
        help="A text, or .jsonl with prompt, messages or tokens in each line.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="FOLDER", help="Whose tokenizer the prompts need; else the namespace's."
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--size", parser=parse_size, metavar="SIZE", help="No more than this, like 20GiB."
    ),
]
HottestOption = Annotated[
    bool, typer.Option("--hottest", help="The most used blocks first, instead of the newest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def only_with(needed: str, given: object, **options: object) -> None:
    """Refuse options that would say nothing where the one that they belong to is not given."""
    for name, value in options.items():
        if given is None and value not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"says nothing without {needed}: add it", param_hint=option)


def tier_of(text: str | None, config: StackConfig, option: str = "--tier") -> int | None:
    """The tier that an option names, by number or kind."""
    if text is None:
        return None
    kinds = [settings.kind for settings in config.tiers]
    numbers = [str(index) for index in range(len(kinds))]
    if text in numbers:
        return numbers.index(text)
    if kinds.count(text) == 1:
        return kinds.index(text)
    numbered = ", ".join(f"{index} {kind}" for index, kind in enumerate(kinds))
    raise typer.BadParameter(f"{text!r} is not one tier of {numbered}", param_hint=option)
