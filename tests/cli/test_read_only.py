"""Looking at what may only be read: folders without the right to write, and a read-only mount.

Whoever inspects a snapshot, or another's cache, needs no right to change it, and changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes.cli_world import STACK, Done, Hold, command, no_rights, put

from kvtier import Stack
from kvtier.cli import app
from kvtier.cli.inspect import look
from kvtier.config import load
from kvtier.inspect.contents import Locked, locked_files
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Presence

pytestmark = pytest.mark.slow

BLOCKS = 8
LOOKS = {
    "ls": "ls -c {stack}",
    "ls json": "ls -c {stack} --json",
    "ls one": f"ls {NAMESPACE.id} -c {{stack}}",
    "du": "du -c {stack}",
    "ls block": f"ls {make_keys(1)[0].hex()} -c {{stack}}",
    "verify": "verify -c {stack}",
    "config show": "config show {stack}",
    "snapshot": "snapshot --to file://{out}/store -c {stack}",
    "prewarm from": "prewarm --from {stack} -c {out}/stack.yaml",
    "copy": "copy file://{kept}/store {out}/stack.yaml",
}
DEEDS = {
    "prewarm": "prewarm -c {stack}",
    "snapshot": "snapshot -c {stack}",
    "snapshot into": "snapshot -c {out}/stack.yaml --to file://{kept}/store",
    "config check": "config check {stack}",
}
# Makes its first argument a read-only mount that only the rest of the words see.
MOUNT = """
mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 125
shift; exec "$@"
"""
Run = Callable[[str], Done]


class Kept:
    """A stack of three tiers below one folder, with blocks in all; and another, which is empty."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.out = folder / "kept", folder / "out"
        self.stack = self._make(self.kept)
        self._make(self.out)
        put(self.stack, make_keys(BLOCKS))

    def _make(self, home: Path) -> Path:
        (home / "host").mkdir(parents=True)
        path = home / "stack.yaml"
        text = STACK.format(host=home / "host", blocks=home / "blocks")
        path.write_text(
            f'{text}  - {{kind: object, capacity: 64MiB, url: "file://{home}/store"}}\n'
        )
        return path

    def words(self, text: str) -> list[str]:
        return [
            word.format(stack=self.stack, out=self.out, kept=self.kept) for word in text.split()
        ]

    def state(self) -> dict[str, tuple[int, int, int]]:
        """Everything there, by what would show that it was written to."""
        found = {str(path): path.lstat() for path in [self.kept, *self.kept.rglob("*")]}
        return {
            name: (info.st_mtime_ns, info.st_ctime_ns, info.st_size) for name, info in found.items()
        }


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def mounted(kept: Kept) -> list[object]:
    """The words that run a command where the stack is mounted read-only."""
    before = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    before += ["sh", "-c", MOUNT, "sh", str(kept.kept)]
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    return list(before)


@pytest.fixture(params=["rights", "mount"])
def run(request: pytest.FixtureRequest, kept: Kept) -> Iterator[Run]:
    """Runs commands that may read the stack and not write to it."""
    if request.param == "mount":
        before = mounted(kept)
        yield lambda text: command(*kept.words(text), before=before)
        return
    paths = [kept.kept, *kept.kept.rglob("*")]
    folders = [path for path in paths if path.is_dir()]
    for path in paths:
        path.chmod(0o500 if path in folders else 0o400)
    yield lambda text: command(*kept.words(text), rights=False)
    for path in folders:
        path.chmod(0o700)


@pytest.mark.parametrize("words", LOOKS.values(), ids=LOOKS)
def test_looking_needs_no_right_to_write(words: str, run: Run, kept: Kept) -> None:
    before = kept.state()
    done = run(words)
    assert (done.code, done.err) == (0, "")
    assert done.out
    assert kept.state() == before


@pytest.mark.parametrize("words", LOOKS.values(), ids=LOOKS)
def test_nor_does_it_write_where_it_could(words: str, kept: Kept) -> None:
    before = kept.state()
    done = command(*kept.words(words))
    assert (done.code, done.err) == (0, "")
    assert kept.state() == before


@pytest.mark.parametrize("words", DEEDS.values(), ids=DEEDS)
def test_deeds_are_refused(words: str, run: Run, kept: Kept) -> None:
    before = kept.state()
    done = run(words)
    assert done.code == 2
    assert "no right to write" in done.err or "is mounted read-only" in done.err
    assert kept.state() == before


@pytest.mark.parametrize("words", ["gc", "gc --dry-run", "verify --repair"])
def test_who_finds_nothing_to_remove_needs_no_right_to(words: str, run: Run, kept: Kept) -> None:
    before = kept.state()
    done = run(f"{words} -c {{stack}}")
    assert (done.code, done.err) == (0, "")
    assert kept.state() == before


def test_what_may_not_be_removed_stays_and_is_named(run: Run, kept: Kept) -> None:
    before = kept.state()
    done = run("clear --yes -c {stack}")
    assert (done.code, done.out) == (1, "0 blocks (0 B) were removed\n")
    places = (f"{kept.kept}/host/", f"{kept.kept}/blocks/lock", "the store kept some objects")
    for place, line in zip(places, done.err.splitlines(), strict=True):
        assert line.startswith(f"kvtier: {place}")
        assert "Permission denied" in line or "Read-only file system" in line
    assert kept.state() == before


def test_the_doctor_finds_it(run: Run, kept: Kept) -> None:
    before = kept.state()
    done = run("doctor -c {stack} --json")
    assert (done.code, done.err) == (1, "")
    found = json.loads(done.out)["findings"]
    bad = {each["area"]: each["what"] for each in found if each["level"] == "bad"}
    assert bad.keys() == {"0 cpu", "1 nvme", "2 object"}
    said = ("may write", "right to write", "is mounted read-only")
    assert all(any(words in what for words in said) for what in bad.values())
    assert kept.state() == before


@pytest.fixture
def only_read(kept: Kept) -> str:
    """A stack of its own, but for the store, from which it only reads."""
    path = kept.out / "reader.yaml"
    own = (kept.out / "stack.yaml").read_text().replace(f"{kept.out}/store", f"{kept.kept}/store")
    path.write_text(own.replace("kind: object", "kind: object, write: never"))
    return str(path)


def test_a_store_that_is_only_read_need_not_be_written_to(
    only_read: str, run: Run, kept: Kept
) -> None:
    before = kept.state()
    for words in ("config check {}", "doctor --no-measure -c {}", "prewarm -c {}", "du -c {}"):
        done = run(words.format(only_read))
        assert done.code == 0, done.err
    rows = json.loads(run(f"ls --json -c {only_read}").out)["namespaces"]
    assert [(row["kind"], row["blocks"]) for row in rows] == [("nvme", BLOCKS), ("object", BLOCKS)]
    assert kept.state() == before
    done = run(f"snapshot -c {only_read}")
    assert (done.code, done.out) == (1, "")
    assert "Read-only file system" in done.err or "the right to write" in done.err
    assert kept.state() == before


def test_commands_fill_a_store_from_which_engines_only_read(only_read: str, kept: Kept) -> None:
    key = make_keys(1, start=100)[0]
    with Stack.open(Path(only_read), NAMESPACE) as stack:
        stack.store({key: payload(key)})
        assert stack.settle()
    assert command("snapshot", "-c", only_read).code == 0
    with Stack.open(Path(only_read), NAMESPACE) as stack:
        stack.chain.tiers[-1].refresh()
        assert stack.chain.tiers[-1].lookup([key]) == [Presence.HIT]


@pytest.mark.parametrize("kind", ["nvme", "object"])
def test_a_copy_leaves_what_others_keep_where_this_stack_only_reads(kept: Kept, kind: str) -> None:
    """Its own capacity, and how old blocks may be, say nothing there."""
    many = make_keys(400)
    with Stack.open(kept.stack, NAMESPACE) as stack:
        for start in range(0, len(many), 100):
            stack.store({key: payload(key) for key in many[start : start + 100]})
            assert stack.settle()
    text = kept.stack.read_text().replace(str(kept.kept / "host"), str(kept.out / "host"))
    reader = kept.out / "reader.yaml"
    text = text.replace(f"kind: {kind}", f"kind: {kind}, write: never")
    text = text.replace("64MiB", "1MiB, age_max: 1s").replace("16MiB", "2MiB")
    reader.write_text(text)
    for path in (kept.kept / "store").rglob("*"):
        os.utime(path, (0, 0))
    put(kept.out / "stack.yaml", make_keys(8, start=1000))
    source = ("--from", kept.out / "stack.yaml", "--into", kind)
    done = command("prewarm", "-c", reader, *source)
    assert done.code == 0, done.err
    tier = ["nvme", "object"].index(kind) + 1
    (place,) = look(load(kept.stack), tier)
    there = {block.key for block in place.blocks()}
    assert there == {*many, *make_keys(8, start=1000)}


SERVES = """
import sys
from pathlib import Path
from kvtier import Stack
from kvtier.testing.subject import NAMESPACE, make_keys, payload
if __name__ == "__main__":
    wanted = {key: payload(key) for key in make_keys(int(sys.argv[2]))}
    with Stack.open(Path(sys.argv[1]), NAMESPACE, serving=True) as stack:
        assert stack.load(list(wanted)) == wanted
        stack.store({key: payload(key) for key in make_keys(2, start=100)})
        assert stack.settle()
"""


@pytest.mark.parametrize("how", ["rights", "mount"])
def test_an_engine_serves_from_a_disk_that_it_may_only_read(kept: Kept, how: str) -> None:
    """Like an image of a cache that many machines share."""
    path = kept.out / "reader.yaml"
    own = (kept.out / "stack.yaml").read_text()
    own = own.replace(f"{kept.out}/blocks", f"{kept.kept}/blocks")
    path.write_text(own.replace("kind: nvme", "kind: nvme, write: never"))
    program = kept.out / "serves.py"
    program.write_text(SERVES)
    before = mounted(kept) if how == "mount" else []
    there = kept.state() if how == "mount" else {}
    if how == "rights":
        for each in [kept.kept, *kept.kept.rglob("*")]:
            each.chmod(0o500 if each.is_dir() else 0o400)
    preexec = None if how == "mount" else no_rights
    words = [*map(str, before), sys.executable, str(program), str(path), str(BLOCKS)]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=preexec, timeout=300)
    said = command("doctor", "-c", path, before=before, rights=how == "mount")
    if how == "rights":
        for each in [kept.kept, *kept.kept.rglob("*")]:
            each.chmod(0o700)
    else:
        assert kept.state() == there
    assert (done.returncode, done.stderr) == (0, "")
    assert (said.code, "is only read, and may be" in said.said) == (0, True)


def test_a_disk_that_may_only_be_read_is_refused_with_a_way_out(run: Run) -> None:
    assert "or write: never" in run("config check {stack}").said


def test_beside_a_running_engine(kept: Kept, hold: Hold) -> None:
    """What is looked at through the mount is what the engine holds at the moment."""
    before = mounted(kept)
    engine = hold(kept.stack, 2 * BLOCKS)
    rows = json.loads(command("ls", "-c", kept.stack, "--json", before=before).out)["namespaces"]
    assert [(row["kind"], row["blocks"], row["in_use"]) for row in rows] == [
        ("cpu", 2 * BLOCKS, True),
        ("nvme", 2 * BLOCKS, True),
        ("object", 2 * BLOCKS, None),
    ]
    assert command("verify", "-c", kept.stack, before=before).code == 0
    engine.communicate("check\n")
    assert engine.returncode == 0


def test_a_stack_that_was_never_used(kept: Kept) -> None:
    """Its folders are not made where nothing can be."""
    stack = kept.out / "stack.yaml"
    kept.out.chmod(0o500)
    try:
        done = command("ls", "-c", stack, rights=False)
    finally:
        kept.out.chmod(0o700)
    assert (done.code, done.out, done.err) == (0, "nothing is stored here yet\n", "")
    assert app.run(["ls", "-c", str(stack)]) == 0
    assert {path.name for path in kept.out.iterdir()} == {"host", "stack.yaml"}


def test_what_goes_while_it_is_looked_at(kept: Kept) -> None:
    places = look(load(kept.stack, to_write=False))
    assert app.run(["clear", "--yes", "-c", str(kept.stack)]) == 0
    assert [list(place.blocks()) for place in places[:2]] == [[], []]


def test_whose_memory_it_is_is_seen(kept: Kept) -> None:
    """Of namesakes, too, and of data-parallel ranks; while they run."""

    def names() -> set[str]:
        return {slab.engine for slab in look(load(kept.stack))[0].slabs}

    stacks: list[Stack] = []
    with ExitStack() as engines:
        for engine in (None, None, "cli-dp1"):
            stacks.append(engines.enter_context(Stack.open(kept.stack, NAMESPACE, engine=engine)))
        end = time.monotonic() + 60
        while (found := names()) != {"cli", "cli~2", "cli-dp1"} and time.monotonic() < end:
            for each in stacks:  # one may be handing a slab over to another
                each.chain.tiers[0].refresh()
        assert found == {"cli", "cli~2", "cli-dp1"}
    assert names() == {""}


def test_a_file_of_the_same_number_elsewhere_is_not_in_use(tmp_path: Path) -> None:
    """Each tmpfs counts its files from one."""
    path = tmp_path / "file"
    path.touch()
    status = path.stat()
    assert not locked_files().has(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert locked_files().has(path)
    others = {(status.st_dev + 1, status.st_ino), (status.st_dev, status.st_ino + 1)}
    assert not Locked(others, {status.st_dev}).has(path)
    assert Locked(others, set()).has(path), "as on btrfs, whose devices have two numbers"
