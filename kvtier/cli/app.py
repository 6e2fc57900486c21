"""All commands of `kvtier`: the file of each is found only when it is called."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from kvtier import __version__
from kvtier.cli import console, options
from kvtier.cli.signals import EXIT_INTERRUPTED, EndSignal, raise_end_signals
from kvtier.errors import KVTierError

# Name, module here, and what it does.
COMMANDS = {
    "config": ("config", "Check, show and start stack files."),
    "serve": ("serve", "Serve a model with vLLM, its KV cache kept in a stack."),
    "demo": ("demo", "See what it is good for: a prompt cold, warm, after a crash."),
    "ls": ("ls", "List what a stack holds, and show one block."),
    "du": ("du", "Show how full each tier is."),
    "top": ("top.command", "See what servers do with their cache."),
    "explain": ("explain", "Say why a prompt hits or misses."),
    "pin": ("pin", "Keep the blocks of known prompts, or no longer."),
    "copy": ("copy", "Copy blocks between stacks and stores."),
    "prewarm": ("copy", "Copy blocks into a tier before it is asked."),
    "snapshot": ("copy", "Copy what memory and disks hold to an object store."),
    "verify": ("verify", "Check every record of a stack."),
    "clear": ("clear", "Remove blocks, or (gc) what nobody will ask for again."),
    "doctor": ("doctor", "Look for what is wrong, and say what to do."),
    "plan": ("plan", "Say what a stack is worth for a model."),
    "bench": ("bench", "Measure the tiers of a stack."),
}

# What commands of 0.1 were called, and what does the same; for one release.
FORMER = {
    "restore": "kvtier prewarm --from URL, or kvtier copy URL stack.yaml",
    "export": "kvtier copy stack.yaml file:///folder",
    "import": "kvtier copy file:///folder stack.yaml",
    "show": "kvtier ls NAMESPACE, or kvtier ls KEY",
    "unpin": "kvtier pin --remove",
}

# Other names that people try, and what does it.
SPELLINGS = {
    "version": ["--version"],
    "status": ["du"],
    "dashboard": ["top", "--page"],
    "migrate": ["config", "migrate"],
    "gc": ["clear", "--garbage"],
}

_CONFIG_FLAGS = ("-c", "--config")
_STACK = "stack.yaml"
"""The stack where none is named, if there is one here."""

_NAMED = {
    "FILE": "file",
    "PROMPT_FILE": "file",
    "FOLDER": "folder",
    "MODEL": "model",
    "FROM": "place",
    "TO": "place",
}


class _Command(TyperCommand):
    """Refuses an option that stands twice: only the last would count, and nobody would know. And an
    empty text for a file: it would be taken for the folder in which this is run.
    Prints examples as they can be typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes what is not written to its end
            return super().parse_args(ctx, args)
        values, rest, given = self.make_parser(ctx).parse_args(list(args))
        for param in self.params:
            assert isinstance(param, TyperOption | TyperArgument)
            what = _NAMED.get(str(param.metavar))
            if what is not None and values.get(param.name) == "":
                raise typer.BadParameter(f"an empty text names no {what}", ctx, param)
        if rest and any(param.name == "prompts" for param in self.params):
            raise typer.BadParameter(f"write --prompts {rest[0]}", ctx, param_hint="PROMPT_FILE")
        if self._lacks_stack(values):
            args = ["--config", _STACK, *args]
        for option in given:
            if not isinstance(option, TyperOption) or option.multiple or option.is_flag:
                continue
            if given.count(option) > 1:
                raise typer.BadParameter("stands twice: name one", ctx, option)
        return super().parse_args(ctx, args)

    def _lacks_stack(self, values: dict[str, Any]) -> bool:
        """Whether no stack is named in any way, and there is one in this folder."""
        if values.get("config") or values.get("file") or "KVTIER_CONFIG" in os.environ:
            return False
        return any(param.name == "config" for param in self.params) and Path(_STACK).is_file()

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        what, _, examples = (self.epilog or "").partition(": ")
        formatter.write(f"\n  {what}:\n")
        width = max(30, formatter.width - len("      ") - len(" \\"))
        for each in examples.split("; "):
            lines = textwrap.wrap(each, width, break_long_words=False, break_on_hyphens=False)
            formatter.write("    " + " \\\n      ".join(lines) + "\n")


class _Commands(TyperGroup):
    """Lists all commands from the table above, and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        _, help_text = COMMANDS.get(cmd_name, ("", None))
        return None if help_text is None else TyperCommand(cmd_name, help=help_text)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # to suggest
        if args and args[0] in FORMER:
            console.warn(f"{args[0]} is not a command any more: write {FORMER[args[0]]}")
            raise typer.Exit(console.EXIT_USAGE)
        name, stub, rest = super().resolve_command(ctx, args)
        command = load(name) if stub is not None and name else stub
        console.speak_for_log()
        raise_end_signals()
        return name, command, rest

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _exit_codes():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _exit_codes():
            return super().invoke(ctx)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn how a command ends into its exit code; only a mistake in kvtier passes through."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(console.EXIT_CLOSED_PIPE) from None
    except (KVTierError, OSError) as error:
        unwritten = console.end_output(console.EXIT_OK)  # it may have been standard output's
        raise typer.Exit(unwritten or console.explain(error)) from None
    except EndSignal as ended:
        raise typer.Exit(128 + ended.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def load(name: str) -> Any:
    """Import one command."""
    module, help_text = COMMANDS[name]
    found = import_module(f"kvtier.cli.{module}")
    for each in found.app.registered_commands:
        each.cls = _Command
    command = typer.main.get_command(found.app)
    command = getattr(command, "commands", {}).get(name, command)
    command.name = name
    command.help = command.help or help_text
    return command


app = typer.Typer(
    cls=_Commands,
    name="kvtier",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=options.HELP,
    epilog="Exit codes: 0 all is well, 1 something was found or failed, 2 the call or the "
    "configuration is wrong, 130 interrupted (143 by `kill`, 129 by a closed terminal), 141 the "
    "reader of the output went away.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.say(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Keep an LLM server's KV cache: on GPU, CPU memory, NVMe and an object store."""


def _as_meant(args: Sequence[str]) -> list[str]:
    """What people type as with other programs: `kvtier help ls`, `kvtier -c stack.yaml ls`."""
    words = list(args)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if len(words) > 2 and words[0] in _CONFIG_FLAGS:
        words = [words[2], *words[:2], *words[3:]]
    return [*SPELLINGS.get(words[0], words[:1]), *words[1:]] if words else words


def run(args: Sequence[str]) -> int:
    """Run one command and answer its exit code."""
    try:
        typer.main.get_command(app)(_as_meant(args), prog_name="kvtier")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else console.EXIT_FAILURE
    return console.end_output(code)
