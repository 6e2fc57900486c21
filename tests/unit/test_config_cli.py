"""`kvtier config`, and how every command speaks and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvtier import __version__
from kvtier.cli import commands, console
from kvtier.config import load

ROOT = Path(__file__).parents[2]
KVTIER = Path(sys.executable).with_name("kvtier")


@pytest.fixture
def stack(tmp_path: Path, other_tiers: None) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text("version: 1\ntiers: [{kind: bench, capacity: 5MiB}]\n")
    return path


def refused(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    assert commands.run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_a_tier_of_another_package_is_not_said_to_be_empty(
    stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run(["ls", "-c", str(stack)]) == 1
    out, err = capsys.readouterr()
    assert out == "nothing is stored in what can be seen\n"
    assert "a tier of kind bench holds cannot be seen from outside" in err


class TestCheck:
    def test_a_good_file(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "check", str(stack)]) == 0
        assert capsys.readouterr().out == f"{stack}: all is well (bench)\n"

    def test_a_bad_file_names_every_place(
        self, stack: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stack.write_text("version: 1\nname: 7\ntiers: [{kind: bench}]\n")
        lines = refused(capsys, "config", "check", str(stack)).splitlines()
        assert [line.split(" - ")[0] for line in lines] == [
            f"kvtier: {stack}:2:1: $.name: expected a text, got a whole number",
            f'kvtier: {stack}:3:9: $.tiers[0]: lacks "capacity"',
        ]

    def test_json(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "check", str(stack), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "errors": [], "warnings": []}
        stack.write_text("version: 1\ntiers: [{kind: bench, capacity: 5MB, wrt: never}]\n")
        assert commands.run(["config", "check", str(stack), "--json"]) == 2
        assert json.loads(capsys.readouterr().out) == {
            "ok": False,
            "errors": [
                {
                    "line": f"{stack}:2:38",
                    "place": "$.tiers[0].wrt",
                    "problem": 'unknown key "wrt"',
                    "remedy": 'did you mean "write"?',
                }
            ],
            "warnings": [],
        }

    def test_a_profile_that_another_user_may_have(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A warning here; serving, for which it must be there, refuses it."""
        config = tmp_path / "config"
        config.write_text("[profile kv]\nregion = eu-north-1\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        stack = tmp_path / "stack.yaml"
        tiers = '[{kind: cpu, path: "%s", capacity: 4MiB}, {kind: object, url: "s3://bucket/kv", '
        tiers += "capacity: 1TiB, profile: %s}]"
        stack.write_text(f"version: 1\ntiers: {tiers}\n" % (tmp_path, "kv"))
        assert commands.run(["config", "check", str(stack)]) == 0
        assert capsys.readouterr() == (f"{stack}: all is well (cpu -> object)\n", "")
        stack.write_text(stack.read_text().replace("profile: kv", "profile: other"))
        assert commands.run(["config", "check", str(stack)]) == 0
        out, err = capsys.readouterr()
        assert "all is well (cpu -> object), but for this user\n" in out
        assert f"{stack}: $.tiers[1]: there is no AWS profile 'other'" in err
        assert commands.run(["config", "check", str(stack), "--json"]) == 0
        (warning,) = json.loads(capsys.readouterr().out)["warnings"]
        assert warning["place"] == "$.tiers[1]"
        err = refused(capsys, "serve", "a/model", "--config", str(stack))
        assert "there is no AWS profile 'other'" in err

    def test_the_file_of_another_machine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Where changes to it are checked there is no such disk, memory or profile."""
        stack = tmp_path / "stack.yaml"
        tiers = [
            {"kind": "cpu", "capacity": "900TiB"},
            {"kind": "cpu", "path": "/not/here", "capacity": "50%"},
            {"kind": "nvme", "path": str(tmp_path / "blocks"), "capacity": "900TiB"},
            {"kind": "nvme", "path": "/mnt/nowhere/blocks", "capacity": "80%"},
            {"kind": "object", "url": "file:///mnt/nowhere/kv", "capacity": "1TiB"},
            {"kind": "object", "url": "s3://bucket/kv", "capacity": "1TiB", "ca_bundle": "/no.pem"},
        ]
        stack.write_text(json.dumps({"version": 1, "tiers": tiers}))
        said = refused(capsys, "config", "check", str(stack))
        assert len(said.splitlines()) == len(tiers)
        assert commands.run(["config", "check", str(stack), "--elsewhere"]) == 0
        assert "all is well" in capsys.readouterr().out
        tiers[2]["capacity"] = "1KiB"
        tiers[5]["threads"] = 9999
        stack.write_text(json.dumps({"version": 1, "tiers": tiers}))
        said = refused(capsys, "config", "check", str(stack), "--elsewhere")
        assert [line.split(": ")[2] for line in said.splitlines()] == [
            "$.tiers[2].capacity",
            "$.tiers[5].threads",
        ]

    def test_against_a_block(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "check", str(stack), "--block-size", "5MiB"]) == 0
        capsys.readouterr()
        err = refused(capsys, "config", "check", str(stack), "--block-size", "6MiB")
        assert "$.tiers[0].capacity: 5MiB holds no block" in err
        err = refused(capsys, "config", "check", str(stack), "--block-size", "6M")
        assert "did you mean" in err

    def test_a_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "there is no such file" in refused(capsys, "config", "check", str(tmp_path / "x"))

    @pytest.mark.parametrize("what", ["check", "show"])
    def test_an_option_may_name_the_file(
        self, what: str, stack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert commands.run(["config", what, "--config", str(stack)]) == 0
        assert commands.run(["config", what, "-c", str(stack), str(stack)]) == 2, "only one"
        monkeypatch.setenv("KVTIER_CONFIG", "/no/such/file")
        assert commands.run(["config", what]) == 2
        assert commands.run(["config", what, str(stack)]) == 0
        assert commands.run(["config", what, "-c", str(stack)]) == 0
        monkeypatch.delenv("KVTIER_CONFIG")
        assert commands.run(["config", what]) == 2

    def test_the_environment_may_name_the_file(
        self, stack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVTIER_CONFIG", str(stack))
        assert commands.run(["config", "check"]) == 0


class TestShow:
    def test_defaults_are_filled_in(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "show", str(stack)]) == 0
        shown = capsys.readouterr().out
        assert "load_deadline: 10s" in shown
        assert load(yaml.safe_load(shown)) == load(stack)

    def test_json(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "show", str(stack), "--json"]) == 0
        assert load(json.loads(capsys.readouterr().out)) == load(stack)


class TestSchemaAndReference:
    def test_kinds_of_other_packages_are_in_them(
        self, stack: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        err = refused(capsys, "config", "schema", code=1)
        assert "tier kind 'broken'" in err

    def test_built_in(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "schema", "--built-in"]) == 0
        assert "StackConfig" in json.loads(capsys.readouterr().out)["$defs"]
        assert commands.run(["config", "reference", "--built-in"]) == 0
        assert "kind: memory" in capsys.readouterr().out


class TestInit:
    def test_a_file_for_this_machine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, folder = tmp_path / "stack.yaml", tmp_path / 'odd "$${folder}" # here'
        args = ["config", "init", str(file), "--folder", str(folder)]
        assert commands.run(args) == 0
        assert folder.stat().st_mode & 0o777 == 0o700
        config: Any = load(file)
        assert [settings.kind for settings in config.tiers] == ["cpu", "nvme"]
        assert Path(config.tiers[1].path) == folder
        capsys.readouterr()
        text = file.read_text()
        assert "exists" in refused(capsys, *args, code=1)
        assert file.read_text() == text

    def test_sizes_stand_there_as_they_were_given(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        args = ["config", "init", "--folder", str(tmp_path), "--memory", "25%", "--disk", "3TB"]
        assert commands.run(args) == 0
        tiers = yaml.safe_load(capsys.readouterr().out)["tiers"]
        assert [tier["capacity"] for tier in tiers] == ["25%", "3TB"]

    def test_names_sizes_and_a_bucket(self, tmp_path: Path) -> None:
        file, bucket = tmp_path / "stack.yaml", f"file://{tmp_path}/bucket"
        args = ["config", "init", str(file), "--folder", str(tmp_path / "kv"), "--name", "first"]
        args += ["--memory", "16MiB", "--disk", "32MiB", "--bucket", bucket]
        assert commands.run(args) == 0
        config: Any = load(file)
        assert [settings.kind for settings in config.tiers] == ["cpu", "nvme", "object"]
        assert config.name == "first"
        assert [str(settings.capacity) for settings in config.tiers] == ["16MiB", "32MiB", "1TiB"]
        assert config.tiers[2].url == bucket

    def test_a_size_that_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--disk" in refused(capsys, "config", "init", "--disk", "a lot")

    def test_printed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["config", "init", "--folder", str(tmp_path / "new")]) == 0
        assert str(tmp_path / "new") in capsys.readouterr().out
        assert not (tmp_path / "new").exists()

    def test_where_nobody_may_write(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "gone" / "stack.yaml"
        assert "is not a folder; make it" in refused(capsys, "config", "init", str(target), code=1)


class TestTheFrame:
    @pytest.mark.parametrize("name", commands.COMMANDS)
    def test_every_command_has_help_with_an_example(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert commands.run([name, "--help"]) == 0
        assert "Usage: kvtier " in capsys.readouterr().out
        command = commands.load(name)
        for each in getattr(command, "commands", {"": command}).values():
            assert each.help, f"{name} {each.name} says nothing about itself"
            assert "Example" in (each.epilog or ""), f"{name} {each.name} has no example"

    def test_help_lists_all_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["--help"]) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in commands.COMMANDS)
        assert "Exit codes" in out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.run(["--version"]) == 0
        assert capsys.readouterr().out == f"kvtier {__version__}\n"

    @pytest.mark.parametrize("args", [["nope"], ["config", "nope"], ["--nope"], ["config"]])
    def test_wrong_calls(self, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert "Usage" in refused(capsys, *args)

    def test_help_imports_no_command(self) -> None:
        code = (
            "import sys; from kvtier.cli.commands import run; run(['--help']); "
            "print(*[m for m in sys.modules if m.startswith('kvtier.')], file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert "kvtier.cli.commands" in done.stderr
        assert "kvtier.cli.config" not in done.stderr

    def test_forty_columns(self, stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        environment = os.environ | {"COLUMNS": "40"}
        done = subprocess.run(
            [KVTIER, "config", "init", "--help"], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 52

    @pytest.mark.parametrize("command", [["config", "schema", "--built-in"], ["--help"]])
    def test_output_into_a_closed_pipe(self, command: list[str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([KVTIER, *command], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")

    def test_output_to_a_full_disk(self) -> None:
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [KVTIER, "config", "schema", "--built-in"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("body", "code", "says"),
        [
            ("raise KeyboardInterrupt", 130, ""),
            ("raise KVTierError('no; do this')", 1, "kvtier: no; do this\n"),
            ("raise PermissionError(13, 'Permission denied', '/x')", 1, "/x: Permission denied"),
            ("raise typer.Exit(1)", 1, ""),
            ("1 / 0", 1, "a mistake in kvtier: ZeroDivisionError"),
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

COMMAND = """
import signal, sys, time, types, typer
from kvtier.cli import commands, console, main
from kvtier.errors import KVTierError
module = types.ModuleType("kvtier.cli.try")
module.app = console.new_app("Try.")
@module.app.command()
def run() -> None:
    {body}
sys.modules[module.__name__] = module
commands.COMMANDS["try"] = "Try."
sys.argv[1:] = ["try"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main.main()
"""


def start_command(body: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(body=body)],
        stdout=subprocess.PIPE,
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

    def test_a_config_option_reads_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Path] = []
        app = console.new_app("Try.")

        @app.command()
        def run(config: console.ConfigOption) -> None:
            seen.append(config)

        monkeypatch.setenv("KVTIER_CONFIG", "x.yaml")
        typer.main.get_command(app).main([], standalone_mode=False)
        assert seen == [Path("x.yaml")]
