"""What is installed: the right files and nothing else, small, quick to import, and what it needs.

`make dist` runs this on the files of a release, which KVTIER_DIST names the folder of.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALLED_MB_MAX = 150
IMPORT_MS_MAX = 200
HELP_MS_MAX = 300
# The processor's time, which is the same beside others; none of the commands waits for anything.
TIME_IT = """
import resource, subprocess, sys
def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
def best(command):
    times = []
    for _ in range(7):
        start = spent()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(spent() - start)
    return min(times) * 1000
nothing = best([sys.executable, "-c", "pass"])
print(best([sys.executable, "-c", "import kvtier"]) - nothing, best(["kvtier", "--help"]))
"""


@pytest.fixture(scope="module")
def dist(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    if given := os.environ.get("KVTIER_DIST"):
        return Path(given)
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", target, source_tree],
        check=True,
        capture_output=True,
    )
    return target


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but the wheel and what it requires."""
    target = tmp_path_factory.mktemp("home") / "venv"
    venv.create(target, with_pip=True)
    # Without hashes: a wheel that was built just now has none that could be stated.
    pins = re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    constraints = target.parent / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    subprocess.run(
        [target / "bin" / "pip", "install", "--quiet", "--constraint", constraints, wheel],
        check=True,
        capture_output=True,
    )
    return target


def product_files() -> list[str]:
    library = [path.relative_to(ROOT) for path in (ROOT / "kvtier").rglob("*.py")]
    backends = ["kvtier" / path.relative_to(ROOT) for path in (ROOT / "backends").rglob("*.py")]
    others = {"kvtier/py.typed", "kvtier/cli/top/page.html"}
    return sorted({str(path) for path in library + backends} | others)


def test_the_wheel_has_the_library_with_its_backends_once_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(names) == product_files()
    assert "kvtier/backends/nvme/__init__.py" in names


def test_the_source_distribution_has_them_too(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = [each.name.partition("/")[2] for each in file.getmembers() if each.isfile()]
    beside = {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "setup.cfg"}
    names = [name for name in names if not name.startswith("kvtier.egg-info/")]
    assert sorted(names) == sorted([*product_files(), *beside])


def test_a_fresh_installation_works(home: Path, wheel: Path, tmp_path: Path) -> None:
    assert not (packages(home) / "backends").exists()
    assert run(home, "kvtier", "--version", cwd=tmp_path).split() == wheel.name.split("-")[:2]
    shutil.copy(ROOT / "examples" / "embedded.py", tmp_path)
    assert "100 hits" in run(home, "python", "embedded.py", "blocks", cwd=tmp_path)
    done = run(home, "kvtier", "config", "init", "stack.yaml", "--folder", "kv", cwd=tmp_path)
    assert "is written" in done
    stack = tmp_path / "stack.yaml"
    stack.write_text(re.sub(r"capacity: \S+", "capacity: 256MiB", stack.read_text()))
    assert "all is well" in run(home, "kvtier", "config", "check", "stack.yaml", cwd=tmp_path)
    measure = "bench --config stack.yaml --blocks 8 --rounds 1"
    done = run(home, "kvtier", *measure.split(), cwd=tmp_path)
    assert {"cpu", "nvme"} <= set(done.split())


def test_it_is_small_and_needs_neither_torch_nor_boto3(
    home: Path, figure: Callable[[str], None]
) -> None:
    files = [path for path in packages(home).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files if "pip" not in path.parts)
    figure(f"pip install kvtier: {size / 1e6:.0f} MB (limit {INSTALLED_MB_MAX})")
    assert size < INSTALLED_MB_MAX * 1e6
    names = {path.name for path in packages(home).iterdir()}
    assert not names & {"torch", "boto3", "botocore", "vllm"}


def test_it_is_quick_to_import(home: Path, tmp_path: Path, figure: Callable[[str], None]) -> None:
    imported, helped = map(float, run(home, "python", "-c", TIME_IT, cwd=tmp_path).split())
    figure(f"import kvtier: {max(imported, 0):.0f} ms (limit {IMPORT_MS_MAX})")
    figure(f"kvtier --help: {helped:.0f} ms (limit {HELP_MS_MAX})")
    assert imported < IMPORT_MS_MAX
    assert helped < HELP_MS_MAX


def packages(home: Path) -> Path:
    (found,) = home.glob("lib/python3*/site-packages")
    return found


def run(home: Path, *command: str, cwd: Path) -> str:
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [home / "bin" / command[0], *command[1:]],
        cwd=cwd,
        env={"PATH": path, "HOME": str(cwd)},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout
