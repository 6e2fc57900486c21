"""`kvtier config`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes.cli_world import refused

from kvtier.cli import app
from kvtier.config import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stack(tmp_path: Path, other_tiers: None) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text("version: 1\ntiers: [{kind: bench, capacity: 5MiB}]\n")
    return path


def test_a_tier_of_another_package_is_not_said_to_be_empty(
    stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["ls", "-c", str(stack)]) == 1
    out, err = capsys.readouterr()
    assert out == "nothing is stored in what can be seen\n"
    assert "a tier of kind bench holds cannot be seen from outside" in err


def test_no_option_is_advised_that_a_command_has_not(
    stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["snapshot", "--to", f"file://{tmp_path}/store", "-c", str(stack)]) == 1
    assert "where a command has --tier" in capsys.readouterr().err


class TestCheck:
    def test_a_good_file(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "check", str(stack)]) == 0
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
        assert app.run(["config", "check", str(stack), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "errors": [], "warnings": []}
        stack.write_text("version: 1\ntiers: [{kind: bench, capacity: 5MB, wrt: never}]\n")
        assert app.run(["config", "check", str(stack), "--json"]) == 2
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
        assert app.run(["config", "check", str(stack)]) == 0
        assert capsys.readouterr() == (f"{stack}: all is well (cpu -> object)\n", "")
        stack.write_text(stack.read_text().replace("profile: kv", "profile: other"))
        assert app.run(["config", "check", str(stack)]) == 0
        out, err = capsys.readouterr()
        assert "all is well (cpu -> object), but for this user\n" in out
        assert f"{stack}: $.tiers[1]: there is no AWS profile 'other'" in err
        assert app.run(["config", "check", str(stack), "--json"]) == 0
        (warning,) = json.loads(capsys.readouterr().out)["warnings"]
        assert warning["place"] == "$.tiers[1]"
        err = refused(capsys, "serve", "a/model", "--config", str(stack))
        assert "there is no AWS profile 'other'" in err
        stack.write_text(stack.read_text().replace(", profile: other", ""))
        monkeypatch.setenv("AWS_PROFILE", "another")
        assert app.run(["config", "check", str(stack)]) == 0
        err = capsys.readouterr().err
        assert "there is no AWS profile 'another', which the environment names" in err

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
        assert app.run(["config", "check", str(stack), "--elsewhere"]) == 0
        assert "all is well" in capsys.readouterr().out
        assert app.run(["config", "show", str(stack), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tiers"][0]["capacity"] == "900TiB"
        tiers[2]["capacity"] = "1KiB"
        tiers[5]["threads"] = 9999
        stack.write_text(json.dumps({"version": 1, "tiers": tiers}))
        said = refused(capsys, "config", "check", str(stack), "--elsewhere")
        assert [line.split(": ")[2] for line in said.splitlines()] == [
            "$.tiers[2].capacity",
            "$.tiers[5].threads",
        ]

    def test_against_a_block(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "check", str(stack), "--block-size", "5MiB"]) == 0
        capsys.readouterr()
        err = refused(capsys, "config", "check", str(stack), "--block-size", "6MiB")
        assert "$.tiers[0].capacity: 5MiB holds no block" in err
        err = refused(capsys, "config", "check", str(stack), "--block-size", "6M")
        assert "did you mean" in err

    @pytest.mark.parametrize("what", ["check", "show"])
    def test_an_option_or_the_environment_may_name_the_file(
        self, what: str, stack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert app.run(["config", what, "--config", str(stack)]) == 0
        assert app.run(["config", what, "-c", str(stack), str(stack)]) == 2, "only one"
        monkeypatch.setenv("KVTIER_CONFIG", "/no/such/file")
        assert app.run(["config", what]) == 2
        assert app.run(["config", what, str(stack)]) == 0
        assert app.run(["config", what, "-c", str(stack)]) == 0
        monkeypatch.setenv("KVTIER_CONFIG", str(stack))
        assert app.run(["config", what]) == 0
        monkeypatch.delenv("KVTIER_CONFIG")
        (elsewhere := stack.parent / "elsewhere").mkdir()
        monkeypatch.chdir(elsewhere)  # where no stack.yaml is
        assert app.run(["config", what]) == 2


class TestShow:
    def test_defaults_are_filled_in(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "show", str(stack)]) == 0
        shown = capsys.readouterr().out
        assert "load_deadline: 10s" in shown
        assert load(yaml.safe_load(shown)) == load(stack)

    def test_json(self, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "show", str(stack), "--json"]) == 0
        assert load(json.loads(capsys.readouterr().out)) == load(stack)


class TestSchemaAndReference:
    def test_kinds_of_other_packages_are_in_them(
        self, stack: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        err = refused(capsys, "config", "schema", code=1)
        assert "tier kind 'broken'" in err

    def test_built_in(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "schema", "--built-in"]) == 0
        assert "StackConfig" in json.loads(capsys.readouterr().out)["$defs"]


class TestInit:
    def test_a_file_for_this_machine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, folder = tmp_path / "stack.yaml", tmp_path / 'odd "$${folder}" # here'
        args = ["config", "init", str(file), "--folder", str(folder)]
        assert app.run(args) == 0
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
        assert app.run(args) == 0
        tiers = yaml.safe_load(capsys.readouterr().out)["tiers"]
        assert [tier["capacity"] for tier in tiers] == ["25%", "3TB"]

    def test_names_sizes_and_a_bucket(self, tmp_path: Path) -> None:
        file, bucket = tmp_path / "stack.yaml", f"file://{tmp_path}/bucket"
        args = ["config", "init", str(file), "--folder", str(tmp_path / "kv"), "--name", "first"]
        args += ["--memory", "16MiB", "--disk", "32MiB", "--bucket", bucket]
        assert app.run(args) == 0
        config: Any = load(file)
        assert [settings.kind for settings in config.tiers] == ["cpu", "nvme", "object"]
        assert config.name == "first"
        assert [str(settings.capacity) for settings in config.tiers] == ["16MiB", "32MiB", "1TiB"]
        assert config.tiers[2].url == bucket

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--folder", "~nobody.has.this.name/kv"], "--folder: there is no home"),
            (["x.yaml", "--folder", "x.yaml"], "--folder: that is the stack file itself"),
            (["x.yaml", "--folder", __file__], "--folder: that is a file; name a folder"),
            (
                ["x.yaml", "--memory", "900TiB"],
                "--memory: 900TiB is more than the",
            ),
            (["x.yaml", "--memory", "1KiB"], "--memory: 1KiB holds not one block"),
            (["x.yaml", "--disk", "900TiB", "--folder", "kv"], "--disk: 900TiB is more than the"),
        ],
    )
    def test_places_that_cannot_be_meant(
        self,
        args: list[str],
        says: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert says in refused(capsys, "config", "init", *args)
        assert list(tmp_path.iterdir()) == []

    def test_printed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert app.run(["config", "init", "--folder", str(tmp_path / "new")]) == 0
        assert str(tmp_path / "new") in capsys.readouterr().out
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("name", ["stack.yaml", "my stack.yaml", "-c.yaml"])
    def test_what_it_says_to_run_can_be_typed(
        self,
        name: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        args = ["config", "init", "--folder", "kv", "--memory", "4MiB", "--disk", "4MiB"]
        assert app.run([*args, "--", name]) == 0
        said = capsys.readouterr().out.partition("then: kvtier ")[2]
        assert app.run(shlex.split(said)) == 0
