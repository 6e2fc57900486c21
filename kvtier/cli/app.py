"""All commands of `kvtier`: the file of each is found only when it is called."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from kvtier import __version__
from kvtier.cli import console, signals
from kvtier.errors import KVTierError

# Name, room in `commands/`, and what it does. The command is the Typer `app` of the file with that
# name there.
COMMANDS = {
    "config": ("setup", "Check, show and start stack files."),
    "serve": ("setup", "Serve a model with vLLM, its KV cache kept in a stack."),
    "demo": ("setup", "See what it is good for: a prompt cold, warm, after a crash."),
    "ls": ("contents", "List what a stack holds."),
    "du": ("contents", "Show how full each tier is."),
    "show": ("contents", "Show one namespace or one block."),
    "explain": ("contents", "Say why a prompt hits or misses."),
    "pin": ("contents", "Keep the blocks of known prompts."),
    "unpin": ("contents", "Keep them no longer."),
    "verify": ("contents", "Check every record of a stack."),
    "gc": ("contents", "Remove what nobody will ask for again."),
    "clear": ("contents", "Remove blocks."),
    "doctor": ("setup", "Look for what is wrong, and say what to do."),
    "prewarm": ("copies", "Fill a tier before it is asked."),
    "snapshot": ("copies", "Copy what a stack holds to an object store."),
    "restore": ("copies", "Copy a snapshot back into a stack."),
    "export": ("copies", "Write blocks to a file."),
    "import": ("copies", "Take blocks in from a file."),
    "plan": ("setup", "Say what a stack is worth for a model."),
    "bench": ("setup", "Measure the tiers of a stack."),
}

_NAMED = {
    "FILE": "file",
    "PROMPT_FILE": "file",
    "FOLDER": "folder",
    "MODEL": "model",
    "URL|FILE": "store",
}


class _Command(TyperCommand):
    """Refuses an option that stands twice: only the last would count, and nobody would know. And an
    empty text for a file: it would be taken for the folder in which this is run.
    Prints examples as they can be typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes what is not written to its end
            return super().parse_args(ctx, args)
        values, _, given = self.make_parser(ctx).parse_args(list(args))
        for param in self.params:
            assert isinstance(param, TyperOption | TyperArgument)
            what = _NAMED.get(str(param.metavar))
            if what is not None and values.get(param.name) == "":
                raise typer.BadParameter(f"an empty text names no {what}", ctx, param)
        for option in given:
            if not isinstance(option, TyperOption) or option.multiple or option.is_flag:
                continue
            if given.count(option) > 1:
                raise typer.BadParameter("stands twice: name one", ctx, option)
        return super().parse_args(ctx, args)

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
        name, stub, rest = super().resolve_command(ctx, args)
        command = load(name) if stub is not None and name else stub
        console.speak_for_log()
        signals.begin()
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
    except signals.EndSignal as ended:
        raise typer.Exit(128 + ended.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(signals.EXIT_INTERRUPTED) from None


def load(name: str) -> Any:
    """Import one command."""
    file = "import_" if name == "import" else name  # no module can have a keyword's name
    room, help_text = COMMANDS[name]
    module = import_module(f"kvtier.cli.commands.{room}.{file}")
    for each in module.app.registered_commands:
        each.cls = _Command
    command = typer.main.get_command(module.app)
    command.name = name
    command.help = command.help or help_text
    return command


app = typer.Typer(
    cls=_Commands,
    name="kvtier",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=console.HELP,
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


def run(args: Sequence[str]) -> int:
    """Run one command and answer its exit code."""
    try:
        typer.main.get_command(app)(list(args), prog_name="kvtier")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else console.EXIT_FAILURE
    return console.end_output(code)
