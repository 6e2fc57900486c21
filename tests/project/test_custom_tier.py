"""A newcomer's tier: installed beside kvtier by its own package, found, and held to the suites."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_tier"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that sees what is installed here, and has the example besides."""
    home = tmp_path_factory.mktemp("newcomer")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    # Through site.addsitedir, so that an editable kvtier is found too.
    here = sysconfig.get_path("purelib")
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    shutil.copytree(EXAMPLE, source(python))  # a build leaves files beside the source
    subprocess.run([python, "-m", "pip", "install", "--quiet", source(python)], check=True)
    return python


def source(python: Path) -> Path:
    """The newcomer's copy of the example."""
    return python.parents[1] / "custom_tier"


def run(python: Path, *arguments: str | Path, **variables: str | Path) -> str:
    """Run in the new environment and nowhere near the sources."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *arguments],
        cwd=python.parents[1],
        env=clean | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kvtier_finds_the_new_kind(python: Path) -> None:
    found = run(python, "-c", "from kvtier.interfaces.backend import kinds; print(*kinds())")
    assert {"folder", "memory", "cpu", "nvme"} <= set(found.split())


def test_the_example_keeps_the_contract(python: Path) -> None:
    strict = ["-W", "error"]  # as its author may want it
    said = run(python, "-m", "pytest", *strict, "-p", "no:cacheprovider", source(python))
    assert "passed" in said
    assert "skipped" not in said


def test_the_example_survives_crashes(python: Path) -> None:
    command = ["-m", "campaign.crash", "folder_subject:SUBJECT", "--kills", "50"]
    said = run(python, *command, PYTHONPATH=f"{source(python) / 'tests'}:{EXAMPLE.parents[1]}")
    assert said.startswith("52 deaths")


def test_the_example_serves_a_stack_across_restarts(python: Path, tmp_path: Path) -> None:
    said = run(python, source(python) / "demo.py", BLOCKS=tmp_path / "blocks")
    assert said == "stored 8 blocks\nfound 8 blocks after a restart\n"
