"""What every command does where something is wrong with the stack.

Whatever is wrong: no traceback, one sentence a trouble, what is not kvtier's stays as it was, and
what can be done is done.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest
from support.processes.cli_world import Done, Hold, command, every_kind, fill, stack_text

from kvtier.cli import app
from kvtier.slab import layout
from kvtier.testing.subject import NAMESPACE, make_keys

pytestmark = pytest.mark.slow

DEEDS = {
    "explain": "explain --prompts {folder}/prompt.jsonl -c {stack}",
    "prewarm into": "prewarm --from {good} -c {stack}",
    "prewarm from": "prewarm --from {stack} -c {empty}",
    "prewarm prompts": "prewarm --from {stack} -c {empty} --prompts {folder}/prompt.jsonl",
    "snapshot": "snapshot --to file://{folder}/new -c {stack}",
    "copy": "copy file://{folder}/store {stack}",
    "plan": "plan {folder}/model.json --no-measure --prefill 1000 -c {stack}",
    "clear": "clear --yes -c {stack}",
    "gc": "gc -c {stack}",
    "repair": "verify --repair -c {stack}",
    "config check": "config check {stack}",
    "config show": "config show {stack}",
    "serve": "serve {folder}/model -c {stack}",
}
LOOKS = {
    "ls": "ls -c {stack}",
    "ls one": f"ls {NAMESPACE.id} -c {{stack}}",
    "du": "du -c {stack}",
    "ls block": f"ls {make_keys(1)[0].hex()} -c {{stack}}",
    "verify": "verify -c {stack}",
    "gc dry run": "gc --dry-run -c {stack}",
}
DEEDS |= LOOKS | {
    "bench": "bench --chunk 4KiB --blocks 2 --rounds 1 -c {stack}",
    "doctor": "doctor --no-measure -c {stack}",
}
KVTIERS = {"lock", "owners", NAMESPACE.id, "namespace.json"}
SLAB = re.compile(r"[0-9a-f]{8}(\.slab|\.table)?")
NO_VLLM = (2, "is not installed here")
NO_KEYS = (1, "its keys were made by no engine")
NEWER = (1, "left alone: update kvtier")
DOWN = (1, "see that the store is running, and kvtier doctor")
RIGHTS = (1, "Permission denied; run this as its owner")
MINE = (1, "it is left alone: remove it if it is nobody's")
FINE = dict.fromkeys(DEEDS, (0, "")) | {
    "explain": NO_KEYS,
    "prewarm prompts": NO_KEYS,
    "serve": NO_VLLM,
}
NOTHING = (0, "there is nothing to copy")
EMPTY = FINE | {
    "explain": (1, "holds nothing yet"),
    "prewarm from": NOTHING,
    "prewarm prompts": NOTHING,
    "snapshot": NOTHING,
    "ls one": (1, "see kvtier ls"),
    "ls block": (1, "see kvtier ls"),
}
IN_USE = FINE | {"clear": (1, "is in use: stop its engine")}
STORE_DOWN = FINE | dict.fromkeys(["prewarm from", "clear", "gc", "repair"], DOWN)
STORE_DOWN |= dict.fromkeys([*LOOKS, "bench"], DOWN)
STORE_DOWN["doctor"] = (1, "see that it is running and can be reached from here")
NO_RIGHTS = dict.fromkeys(DEEDS, (2, "no right to write"))
NO_RIGHTS |= dict.fromkeys(
    ["explain", "prewarm from", "prewarm prompts", "snapshot", "clear", "gc", "repair"],
    RIGHTS,
)
NO_RIGHTS |= dict.fromkeys(LOOKS, RIGHTS) | {"doctor": (1, "no right to write")}
for _deed in ("plan", "config show"):  # which may speak of another machine's stack
    NO_RIGHTS[_deed] = FINE[_deed]
NO_RIGHTS_WITHIN = FINE | dict.fromkeys(DEEDS, RIGHTS)
for _deed in ("plan", "config check", "config show", "serve", "bench", "doctor"):
    NO_RIGHTS_WITHIN[_deed] = FINE[_deed]
for _deed in ("prewarm into", "copy"):
    NO_RIGHTS_WITHIN[_deed] = (
        1,
        "another user has stored there: give it to the user of the engines",
    )
OTHERS = FINE | dict.fromkeys(["prewarm from", "snapshot", "clear", "gc", "repair"], MINE)
OTHERS |= dict.fromkeys(LOOKS, MINE)
OF_NEWER = FINE | dict.fromkeys(
    ["prewarm from", "prewarm prompts", "snapshot", "clear", "gc", "repair"], NEWER
)
OF_NEWER |= dict.fromkeys(LOOKS, NEWER) | {"explain": NEWER}
every = pytest.mark.parametrize("deed", DEEDS)
IN_USE_BY_ONE = IN_USE | dict.fromkeys(["prewarm into", "copy"], (1, "cannot use"))
"""Of a medium that one process at a time may use."""


class Scene:
    """A stack with blocks in it, and beside it what the commands need."""

    def __init__(self, folder: Path, stack: Path, kind: str) -> None:
        self.folder, self.stack, self.kind = folder, stack, kind
        self.good, self.empty = self.another("good"), self.another("empty")

    @property
    def blocks(self) -> Path:
        return self.folder / "disk" / "blocks"

    def another(self, name: str) -> Path:
        home = self.folder / name
        (home / "host").mkdir(parents=True)
        (home / "disk").mkdir()
        path = home / "stack.yaml"
        path.write_text(stack_text(home / "host", home / "disk" / "blocks", self.kind))
        return path

    def words(self, deed: str) -> list[str]:
        places = {"stack": self.stack, "good": self.good, "empty": self.empty}
        return [word.format(folder=self.folder, **places) for word in DEEDS[deed].split()]

    def run(self, deed: str) -> Done:
        """In this process, because there are many; a traceback would fail the test."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(self.words(deed))
        return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture
def scene(stack_file: Path, tmp_path: Path, second_tier: str) -> Scene:
    """The stack itself is empty."""
    scene = Scene(tmp_path, stack_file, second_tier)
    fill(scene.good)
    (tmp_path / "prompt.jsonl").write_text(json.dumps({"tokens": list(range(600))}))
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    (tmp_path / "model.json").write_text(json.dumps(config))
    (tmp_path / "model").mkdir()
    assert app.run(["snapshot", "--to", f"file://{tmp_path}/store", "-c", str(scene.good)]) == 0
    return scene


@pytest.fixture
def stocked(scene: Scene) -> Scene:
    """With blocks in the stack itself, which nobody uses."""
    fill(scene.stack)
    return scene


def check(done: Done, expected: tuple[int, str]) -> None:
    code, says = expected
    assert (done.code, says in done.said) == (code, True), (done.out, done.err)
    assert "Traceback" not in done.err


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """All files below a folder, by what would show that one was written."""
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (info.st_mtime_ns, info.st_size) for name, info in found.items()}


@every
@every_kind
def test_an_empty_stack(deed: str, scene: Scene) -> None:
    check(scene.run(deed), EMPTY[deed])


@every
@every_kind
def test_a_stack_in_use_goes_on_undisturbed(deed: str, scene: Scene, hold: Hold) -> None:
    engine = hold(scene.stack)
    check(scene.run(deed), (IN_USE if scene.kind == "nvme" else IN_USE_BY_ONE)[deed])
    engine.communicate("check\n")
    assert engine.returncode == 0


@every
def test_a_store_that_is_down(deed: str, stocked: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    stocked.stack.write_text(
        f"{stocked.stack.read_text()}  - {{kind: object, capacity: 64MiB, region: none, "
        'url: "s3://bucket/kv", endpoint: "http://127.0.0.1:9"}\n'
    )
    done = stocked.run(deed)
    check(done, STORE_DOWN[deed])
    assert done.out or deed not in LOOKS, "the rest is still seen"


@every
@pytest.mark.parametrize("within", [False, True], ids=["folder", "namespace"])
def test_a_folder_without_rights(deed: str, stocked: Scene, within: bool) -> None:
    folder = stocked.blocks / NAMESPACE.id if within else stocked.blocks
    folder.chmod(0)
    try:
        done = command(*stocked.words(deed), rights=False)
    finally:
        folder.chmod(0o700)
    check(done, NO_RIGHTS_WITHIN[deed] if within else NO_RIGHTS[deed])


@every
def test_a_folder_full_of_other_files(deed: str, stocked: Scene) -> None:
    folder = stocked.blocks
    for name in ("photos", "photos/owners", "ab" * 16):
        (folder / name).mkdir()
    for name in ("a.slab", "b.making", "c.12345678.making", "owners/d", "namespace.json"):
        (folder / "photos" / name).write_text("mine")
    for name in ("notes.txt", f"{'ab' * 16}/00000000.table", f"{NAMESPACE.id}/letters.table"):
        (folder / name).write_text("mine")
    (folder / NAMESPACE.id / "x.making").write_text("mine")
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    if deed != "clear":  # it bears the name of a slab
        os.mkfifo(folder / NAMESPACE.id / "0badbeef.table")
    mine = {name: at for name, at in state(folder).items() if Path(name).name not in KVTIERS}
    mine = {name: at for name, at in mine.items() if not SLAB.fullmatch(Path(name).name)}
    if deed == "gc":  # which removes the table in it, because there is no slab
        del mine[str(folder / ("ab" * 16))]
    check(stocked.run(deed), OTHERS[deed])
    after = state(folder)
    assert {name: after.get(name) for name in mine} == mine
    assert (folder / ("ab" * 16)).is_dir()


@every
def test_files_of_a_newer_version(deed: str, stocked: Scene) -> None:
    files = [*stocked.blocks.rglob("*.table"), *(stocked.folder / "host").rglob("*.table")]
    for path in files:
        with path.open("r+b") as file:
            file.seek(8)
            file.write(b"\2")
    before = {path: path.read_bytes() for path in files}
    check(stocked.run(deed), OF_NEWER[deed])
    assert {path: path.read_bytes() for path in files} == before


def test_what_is_newer_stays_beside_what_is_cleared(stocked: Scene) -> None:
    newer = stocked.blocks / NAMESPACE.id / "0badbeef.table"
    (table,) = [
        path for path in newer.parent.glob("*.table") if any(path.read_bytes()[layout.TABLE_AT :])
    ]
    text = bytearray(table.read_bytes())
    text[8] = 2
    newer.write_bytes(text)
    check(stocked.run("clear"), NEWER)
    assert [path.name for path in newer.parent.glob("*.table")] == [newer.name]
    assert newer.read_bytes() == text


@every
def test_forty_columns(deed: str, stocked: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = stocked.run(deed)
    check(done, FINE[deed])
    for line in done.out.splitlines():
        one_long_word = max(map(len, line.split()), default=0) > 20
        assert len(line) <= 40 or one_long_word, line


@every
def test_a_missing_stack_file(deed: str, scene: Scene) -> None:
    scene.stack.unlink()
    done = scene.run(deed)
    check(done, (2, "there is no such file"))
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("columns", [40, 200])
def test_the_demo_says_that_it_needs_vllm(columns: int) -> None:
    done = command("demo", columns=columns)
    check(done, NO_VLLM)
    assert len(done.err.splitlines()) == 1
