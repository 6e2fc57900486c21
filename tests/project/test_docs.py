"""Every command line in README and docs runs as it stands there.

The blocks marked ```console (lines after "$ ") and ```sh of one page are run in their order by one
shell, in a copy of the project with an empty home. What needs a server, a GPU or a network carries
the comment `<!-- run by tests/... -->` in the line before its block: the test file that runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.docs_links import with_links

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES_BESIDE = [ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("C*.md"))]
QUICK = {ROOT / "README.md", ROOT / "docs/contributing/writing_a_backend.md"}
_BLOCK = re.compile(
    r"(?:^<!-- run by (?P<by>\S+) -->\n)?^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHELLS = {"console", "sh", "bash", "shell", "shell-session"}


class Block(NamedTuple):
    """Commands as they stand on a page."""

    commands: list[str]
    run_by: str | None


def blocks(page: Path) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        kind, body = match["kind"], match["body"]
        if kind in _SHELLS:
            assert kind in ("console", "sh"), f"{page}: mark the block ```console or ```sh"
            found.append(Block(commands(body, typed=kind == "console"), match["by"]))
    return found


def commands(body: str, *, typed: bool) -> list[str]:
    """The commands of a block, each with the lines that continue it; output is left out."""
    found: list[str] = []
    goes_on = False
    for line in body.splitlines():
        if typed and not goes_on and not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ") if typed and not goes_on else line
        text = text.removeprefix("> ") if typed and goes_on else text
        if goes_on:
            found[-1] += "\n" + text
        elif text.strip() and not text.lstrip().startswith("#"):
            found.append(text)
        goes_on = text.endswith("\\")
    return found


@pytest.fixture
def engine_name() -> Iterator[str]:
    """A name of its own for the regions of shared memory that a page leaves behind."""
    name = f"docs-{uuid.uuid4().hex}"
    yield name
    for region in Path("/dev/shm").glob(f"kvtier-*-{name}*"):
        shutil.rmtree(region) if region.is_dir() else region.unlink()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page in QUICK else pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_commands_of_a_page_run(
    page: Path, source_tree: Path, tmp_path: Path, engine_name: str
) -> None:
    script = ["set -euo pipefail"]
    for block in blocks(page):
        for command in block.commands if block.run_by is None else []:
            script += [f"echo {shell_quote('+ ' + command)}", command]
    home = tmp_path / "home"
    home.mkdir()
    project = tmp_path / "kvtier"
    shutil.copytree(source_tree, project, symlinks=True)
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=project,
        env={
            "HOME": str(home),
            "KVTIER_NAME": engine_name,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{page.name} fails in its last command:\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_run_here_is_run_elsewhere(page: Path) -> None:
    for block in blocks(page):
        if block.run_by is not None:
            runner = ROOT / block.run_by
            assert runner.is_file(), f"{page.name} says that {block.run_by} runs {block.commands}"


def test_what_the_readme_leaves_in_a_checkout_is_ignored() -> None:
    """Tests copy what git would take; a stack file that is there fails the commands of the page."""
    text = " ".join(each for block in blocks(ROOT / "README.md") for each in block.commands)
    commands = r"(?:config init|--folder|tiny_model|embedded\.py|>) (?:\./)?([\w.-]+)"
    made = set(re.findall(commands, text)) | set(re.findall(r"file://\$PWD/(\w+)", text))
    assert {"stack.yaml", "blocks", "example-blocks", "model", "bucket", "first.log"} <= made
    paths = [each if "." in each else f"{each}/" for each in sorted(made)]
    asked = ["git", "check-ignore", "--no-index", *paths]
    ignored = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout.split() == paths


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```console\n$ one \\\n>   more\noutput\n$ two\n```\n"
        "<!-- run by tests/x.py -->\n```sh\n# why\nthree\n\nfour \\\n  five\n```\n"
        "```python\nsix\n```\n"
    )
    assert blocks(page) == [
        Block(["one \\\n  more", "two"], None),
        Block(["three", "four \\\n  five"], "tests/x.py"),
    ]


def test_what_others_settings_become_exists() -> None:
    """The last column of the guide names settings of a stack, or of the connector."""
    pages = ("reference/configuration", "how_it_works/eviction", "guides/serve")
    known = " ".join((ROOT / f"docs/{name}.md").read_text() for name in pages)
    page = (ROOT / "docs/guides/migrate.md").read_text()
    columns = [row.strip("|").rsplit("|", 1)[1] for row in re.findall(r"^\|.*\|$", page, re.M)]
    names = {name for text in columns for name in re.findall(r"`([a-z_]+)(?::[^`]*)?`", text)}
    assert len(names) > 15
    assert not {name for name in names if not re.search(rf"\b{name}\b", known)}


@pytest.mark.parametrize("page", PAGES + PAGES_BESIDE, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()
    ):
        goal = (page.parent / target).resolve() if target else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            dead.append(f"{target}#{anchor}")
    assert not dead


def test_the_site_links_to_the_repository_if_it_has_an_address() -> None:
    page = "[stack](../../examples/a.yaml), [copies](gpu.md#measured), [new](../../NEW.md#added)"
    assert with_links(page, "docs/guides", None) == (
        "stack (`examples/a.yaml`), [copies](gpu.md#measured), new (`NEW.md`)"
    )
    assert with_links(page, "docs/guides", "https://forge.example/kvtier") == (
        "[stack](https://forge.example/kvtier/blob/HEAD/examples/a.yaml), "
        "[copies](gpu.md#measured), "
        "[new](https://forge.example/kvtier/blob/HEAD/NEW.md#added)"
    )


def anchors(page: Path) -> set[str]:
    """What can be linked to within a page: its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def shell_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
