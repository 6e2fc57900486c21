"""How every command speaks and ends."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from support.processes.cli_world import KVTIER, refused

from kvtier import __version__
from kvtier.cli import app, console, options

SHORT = (
    "import mmap, resource, threading; "
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)); {then}"
)
A_THREAD = "threading.stack_size(1 << 30); threading.Thread(target=print).start()"


class TestTheFrame:
    @pytest.mark.parametrize("name", app.COMMANDS)
    def test_every_command_has_help_with_an_example(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert app.run([name, "--help"]) == 0
        assert "Usage: kvtier " in capsys.readouterr().out
        command = app.load(name)
        for each in getattr(command, "commands", {"": command}).values():
            assert each.help, f"{name} {each.name} says nothing about itself"
            assert "Example" in (each.epilog or ""), f"{name} {each.name} has no example"

    def test_help_lists_all_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["--help"]) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in app.COMMANDS)
        assert "Exit codes" in out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["--version"]) == 0
        assert capsys.readouterr().out == f"kvtier {__version__}\n"

    @pytest.mark.parametrize("args", [["nope"], ["config", "nope"], ["--nope"], ["config"]])
    def test_wrong_calls(self, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert "Usage" in refused(capsys, *args)

    def test_help_imports_no_command(self) -> None:
        code = (
            "import sys; from kvtier.cli.app import run; run(['--help']); "
            "print(*[m for m in sys.modules if m.startswith('kvtier.')], file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert "kvtier.cli.app" in done.stderr
        assert "kvtier.cli.inspect" not in done.stderr

    def test_forty_columns(self) -> None:
        environment = os.environ | {"COLUMNS": "40"}
        done = subprocess.run(
            [KVTIER, "config", "init", "--help"], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 52

    @pytest.mark.parametrize(
        ("body", "code", "says"),
        [
            ("raise KeyboardInterrupt", 130, ""),
            ("raise KVTierError('no; do this')", 1, "kvtier: no; do this\n"),
            ("raise PermissionError(13, 'Permission denied', '/x')", 1, "/x: Permission denied"),
            ("raise typer.Exit(1)", 1, ""),
            ("1 / 0", 1, "a mistake in kvtier: ZeroDivisionError"),
            (SHORT.format(then="bytearray(1 << 30)"), 1, "kvtier: Cannot allocate memory; free"),
            (SHORT.format(then="mmap.mmap(-1, 1 << 30)"), 1, "kvtier: Cannot allocate memory; fr"),
            (SHORT.format(then=A_THREAD), 1, "kvtier: no more threads can be started here; raise"),
        ],
    )
    def test_how_a_command_ends(self, body: str, code: int, says: str) -> None:
        done = run_command(body)
        assert done.returncode == code
        assert says in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_mistake_can_be_looked_into(self) -> None:
        assert "Traceback" in run_command("1 / 0", KVTIER_TRACEBACK="1").stderr

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_interrupted_by_a_signal(self, number: signal.Signals) -> None:
        # Not signal.pause(): a signal that comes just before it is told only after it, so never.
        body = "print('ready', flush=True)\n    while True: time.sleep(0.01)"
        process = start_command(body)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (128 + number, "")

    def test_interrupted_while_nobody_reads_the_end_of_what_it_says(self) -> None:
        """As by Ctrl-C in a pager that shows the first page."""
        reader, writer = os.pipe()
        room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        body = f"print('x' * ({room} + 1))"
        process = start_command(body, stdout=writer, PYTHONUNBUFFERED="")
        os.close(writer)
        select.select([reader], [], [])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        os.close(reader)
        assert (process.returncode, err) == (130, "")

    @pytest.mark.parametrize(
        ("presses", "said"),
        [
            ("0, 0.9", "the end is reached"),  # by a wrapper that passes it on, too
            ("0, 0.9, 1", ""),  # by somebody who will not wait for a store
        ],
    )
    def test_ctrl_c_again_while_it_is_put_off(self, presses: str, said: str) -> None:
        done = run_command(PUT_OFF.format(presses=presses))
        assert (done.returncode, done.stdout.strip(), done.stderr) == (130, said, "")

    def test_a_terminal_hears_that_ctrl_c_is_put_off(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from kvtier.cli.signals import uninterrupted

        def press_twice() -> None:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), uninterrupted(lambda: 0.0):
                press_twice()
        finally:
            signal.signal(signal.SIGINT, before)
        said = "kvtier: ending what is under way (Ctrl-C again gives it up) ...\n"
        assert capsys.readouterr().err == said

    def test_what_is_waited_for_is_said_before_any_of_it_has_ended(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        with console.progress("simulating", 9, "tiers"):
            assert "simulating 0 of 9 tiers 0.0%" in capsys.readouterr().err

    @pytest.mark.parametrize("module", ["kvtier.errors", "typer", "kvtier.cli.config"])
    def test_interrupted_while_python_imports(self, module: str) -> None:
        code = INTERRUPTED_IMPORT.format(module=module, script=str(KVTIER))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# The installed command, with a Ctrl-C at the moment when a module is asked for.
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[:] = ["{script}", "config", "schema", "--built-in"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
runpy.run_path("{script}", run_name="__main__")
"""

PUT_OFF = """
    from kvtier.cli.signals import uninterrupted
    now = 0.0
    with uninterrupted(lambda: now):
        for now in ({presses}):
            signal.raise_signal(signal.SIGINT)
        print("the end is reached", flush=True)
"""

COMMAND = """
import signal, sys, time, types, typer
from kvtier.cli import app, console, main, options
from kvtier.errors import KVTierError
module = types.ModuleType("kvtier.cli.try")
module.app = options.new_app()
@module.app.command()
def run() -> None:
    {body}
sys.modules[module.__name__] = module
app.COMMANDS["try"] = ("try", "Try.")
sys.argv[1:] = ["try"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main.main()
"""


def start_command(
    body: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(body=body)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def run_command(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start_command(body, **environment)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class TestConsole:
    def test_a_table_fits_a_narrow_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        console.print_table(["name", "bytes"], [["a[b]" * 12, 1], ["b", 22]], numbers=["bytes"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 40
        assert lines[-1].endswith(" 22")
        assert "a[b]a[b]" in lines[2]

    @pytest.mark.parametrize("columns", range(30, 41))
    def test_no_cell_of_several_is_broken(
        self, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is a table where that fits, and names and values else."""
        monkeypatch.setenv("COLUMNS", str(columns))
        console.print_table(list("abcd"), [["1" * 7, "2" * 7, "3" * 7, "4" * 7]])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        assert len(lines) == (3 if columns >= 4 * 7 + 3 * 2 else 4)
        assert all(number * 7 in " ".join(lines) for number in "1234")

    def test_names_and_values(self, capsys: pytest.CaptureFixture[str]) -> None:
        console.print_values({"a": 1, "long": "x"})
        assert capsys.readouterr().out == "a     1\nlong  x\n"

    def test_a_signal_just_before_the_answer_is_awaited_is_heard(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing would interrupt a read that begins after it."""
        main, child = os.openpty()
        said = []

        def wait(read: list[Any], *_: object) -> object:
            signal.raise_signal(signal.SIGUSR1)
            said.append(select.select([read[1]], [], [], 0)[0] == [read[1]])
            os.write(main, b"y\n")
            return read[:1], [], []

        before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
        monkeypatch.setattr(console, "select", SimpleNamespace(select=wait))
        with os.fdopen(child) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            console.confirm("Go?", yes=False)
        signal.signal(signal.SIGUSR1, before)
        os.close(main)
        assert said == [True]
        assert capsys.readouterr() == ("", "Go? [y/N]: ")

    def test_a_name_without_an_end_lengthens_its_own_line_only(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        console.print_values({"a": 1, "b" * 1000: "x"})
        assert list(map(len, capsys.readouterr().out.splitlines())) == [43, 1003]

    def test_a_config_option_reads_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Path] = []
        one = options.new_app()

        @one.command()
        def run(config: options.ConfigOption) -> None:
            seen.append(config)

        monkeypatch.setenv("KVTIER_CONFIG", "x.yaml")
        typer.main.get_command(one).main([], standalone_mode=False)
        assert seen == [Path("x.yaml")]
