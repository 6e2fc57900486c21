"""What may not be read, or cannot be, keeps nothing else from being seen and copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes.cli_world import STACK, command, fill, put, served, with_store

from kvtier.backends.object.object_names import description_name
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace

pytestmark = pytest.mark.slow

BLOCKS = 8
OTHER = Namespace(facts={"model": "another"}, group_bytes=(4096,))


@pytest.fixture
def stored(stack_file: Path, tmp_path: Path) -> Path:
    """A stack whose store has blocks of two models."""
    with_store(stack_file, tmp_path / "store")
    for namespace in (NAMESPACE, OTHER):
        put(stack_file, make_keys(BLOCKS), namespace)
    for tier in ("cpu", "nvme"):
        assert command("clear", "-c", stack_file, "--tier", tier, "--yes").code == 0
    return stack_file


@pytest.mark.parametrize("area", ["0 cpu", "1 nvme", "2 object"])
def test_what_cannot_be_reached_hides_nothing_else(area: str, tmp_path: Path) -> None:
    """As of a disk that has died: what the other tiers have can still be seen, and taken out."""
    for kind in ("cpu", "nvme", "object"):
        (tmp_path / kind).mkdir()
    (tmp_path / "cpu" / "in").mkdir()
    stack = tmp_path / "stack.yaml"
    stack.write_text(STACK.format(host=tmp_path / "cpu" / "in", blocks=tmp_path / "nvme" / "in"))
    fill(with_store(stack, tmp_path / "object" / "in"))
    assert command("snapshot", "-c", stack, "--to", f"file://{tmp_path}/out").code == 0
    closed = area.split()[1]
    where = tmp_path / closed / "in"
    if closed == "cpu":
        (where,) = where.iterdir()
    trouble = f"kvtier: {where}: Permission denied"
    (tmp_path / closed).chmod(0)
    try:
        looks = ("ls", "du", "verify")
        for words in (*looks, "verify --repair", "gc", "gc --idle 30d", "clear --yes"):
            done = command(*words.split(), "-c", stack, rights=False)
            assert (done.code, done.err[: len(trouble)]) == (1, trouble)
            assert done.err.count(trouble) == 1
        assert f"{2 * BLOCKS} blocks" in done.out, "the other tiers are cleared"
        assert command("config", "check", stack, "--elsewhere", rights=False).code == 0
        done = command("doctor", "-c", stack, "--json", rights=False)
        found = json.loads(done.out)["findings"]
        assert {each["area"] for each in found if each["level"] == "bad"} == {area}
        assert {each["area"] for each in found} > {"0 cpu", "1 nvme", "2 object"}
    finally:
        (tmp_path / closed).chmod(0o700)
    assert command("clear", "-c", stack, "--yes").code == 0
    assert command("copy", f"file://{tmp_path}/out", stack).code == 0
    assert served(stack) == BLOCKS


def test_host_memory_that_cannot_be_looked_at_is_not_filled(
    stored: Path, stack_file: Path, tmp_path: Path
) -> None:
    """Another model's blocks may lie there, and would be gone."""
    fill(stack_file)
    words = ["prewarm", "-c", stored, "--into", "cpu", "--namespace", OTHER.id]
    (root,) = (tmp_path / "host").iterdir()
    root.chmod(0o300)
    done = command(*words, rights=False)
    root.chmod(0o700)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"kvtier: {root}: Permission denied; ")
    assert f"holds {BLOCKS} blocks of the namespace {NAMESPACE.id[:12]}" in command(*words).err


@pytest.mark.parametrize("capacity", ["4MiB", "16MiB"])
def test_who_only_looks_needs_no_room(capacity: str, tmp_path: Path) -> None:
    """Where a disk is not mounted, say, or /dev/shm is that of another container."""
    (tmp_path / "host").mkdir()
    stack = tmp_path / "stack.yaml"
    stack.write_text(STACK.format(host=tmp_path / "host", blocks=tmp_path / "blocks"))
    fill(stack)
    stack.write_text(stack.read_text().replace(capacity, "1000TiB"))
    for words in ("ls", "du", "verify", f"snapshot --to file://{tmp_path}/out"):
        assert command(*words.split(), "-c", stack).code == 0
    assert (command("config", "check", stack).code, command("doctor", "-c", stack).code) == (2, 1)


@pytest.mark.parametrize(
    ("lacks", "code", "away"), [("folder", 1, {"1 nvme", "2 object"}), ("target", 0, {"1 nvme"})]
)
def test_a_disk_that_is_not_mounted_hides_no_other_tier(
    lacks: str, code: int, away: set[str], tmp_path: Path
) -> None:
    """The folder that was made on it is not there, or where a link leads to."""
    (tmp_path / "host").mkdir()
    (tmp_path / "disk").mkdir()
    blocks = tmp_path / "disk" / "blocks"
    stored = "store" if lacks == "target" else "disk/store"
    stack = tmp_path / "stack.yaml"
    stack.write_text(STACK.format(host=tmp_path / "host", blocks=blocks))
    fill(with_store(stack, tmp_path / stored))
    (tmp_path / "disk").rename(tmp_path / "away")
    if lacks == "target":
        (tmp_path / "disk").mkdir()
        blocks.symlink_to(tmp_path / "mounted" / "blocks")
    for words in ("ls", "du", "verify"):
        done = command(*words.split(), "-c", stack)
        assert (done.code, done.err.count("No such file")) == (code, 2 * code)
    assert NAMESPACE.id[:12] in command("ls", "-c", stack).out
    assert command("config", "check", stack).code == 2
    done = command("doctor", "-c", stack, "--json")
    found = json.loads(done.out)["findings"]
    assert {each["area"] for each in found if each["level"] == "bad"} == away
    assert {each["area"] for each in found} > {"0 cpu", "1 nvme", "2 object"}


def test_what_is_cleared_is_no_trouble_any_more(stored: Path, tmp_path: Path) -> None:
    """What could not be read of it went with the rest."""
    (tmp_path / "store" / description_name(OTHER.id)).chmod(0)
    done = command("clear", NAMESPACE.id, "-c", stored, "--yes", rights=False)
    assert done.code == 1
    assert f"of the namespace {OTHER.id[:12]}" in done.err
    done = command("clear", OTHER.id, "-c", stored, "--yes", rights=False)
    assert (done.code, done.err) == (0, "")
    assert not (tmp_path / "store" / OTHER.id).exists()


def test_a_closed_manifest_is_told_of(stored: Path, tmp_path: Path, fresh: Path) -> None:
    closed = list((tmp_path / "store" / OTHER.id / "manifest").iterdir())
    for path in closed:
        path.chmod(0)
    words = ["--namespace", OTHER.id, "--into", "nvme"]
    done = command("copy", stored, fresh, *words, rights=False)
    assert done.err.startswith(f"kvtier: {len(closed)} manifests may not be read")
    done = command("copy", stored, fresh, *words, "--tier", "object", rights=False)
    assert done.code == 0, done.err
    assert served(fresh, OTHER) == BLOCKS
    assert all(path.exists() for path in closed)


def test_a_folder_of_another_users_is_named_to_who_may_not_use_it(
    stored: Path, tmp_path: Path
) -> None:
    """Root has copied a model into the folder of another user, whose engine then does not start."""
    assert command("prewarm", "-c", stored).code == 0
    home = tmp_path / "disk" / "blocks" / NAMESPACE.id
    home.chmod(0)
    (home.parent / "lock").chmod(0)
    done = command("doctor", "-c", stored, "--no-measure", rights=False)
    assert f"WARN 1 nvme: {home.parent}/lock is another user's (2 in all)" in done.said
    (home.parent / "lock").chmod(0o600)
    done = command("prewarm", "-n", NAMESPACE.id, "-c", stored, rights=False)
    assert done.code == 1
    assert f"({home}/owners: Permission denied): another user has stored there" in done.err
    done = command("doctor", "-c", stored, "--no-measure", rights=False)
    assert done.code == 0
    assert f"WARN 1 nvme: {home} is another user's: engines of this one that" in done.said


def test_blocks_that_root_has_copied_beside_those_of_another_user_are_found(
    stored: Path, tmp_path: Path
) -> None:
    """Into the folder of a model that is served there already: the engine serves none of them."""
    assert command("prewarm", "-c", stored).code == 0
    tables = sorted((tmp_path / "disk" / "blocks" / NAMESPACE.id).glob("*.table"))
    for table in tables:
        table.chmod(0)
    done = command("doctor", "-c", stored, "--no-measure", rights=False)
    assert f"{tables[0]} is another user's ({len(tables)} in all): engines of this" in done.said
    assert "chown -R" in done.said


def test_a_model_that_root_has_stored_is_found_by_the_doctor(stored: Path, tmp_path: Path) -> None:
    """Engines of another user cannot list the store, and go on without it."""
    closed = tmp_path / "store" / OTHER.id / "blocks"
    closed.chmod(0)
    done = command("ls", "-c", stored, rights=False)
    assert f"{closed}/: Permission denied: give the right to write and read" in done.err
    done = command("doctor", "-c", stored, "--no-measure", rights=False)
    assert done.code == 1
    assert f"BAD 2 object: {closed} may not be read" in done.said
    assert "chown -R" in done.said


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_a_model_that_nothing_describes_keeps_no_other_from_being_restored(
    stored: Path, tmp_path: Path, fresh: Path, lost: bool, named: bool
) -> None:
    """A snapshot that was copied in part, or one of whose objects may not be read."""
    text = tmp_path / "store" / description_name(OTHER.id)
    text.unlink() if lost else text.chmod(0)
    words = ["--namespace", NAMESPACE.id] if named else []
    done = command("copy", stored, fresh, "--tier", "object", *words, rights=False)
    assert done.code == 1
    assert OTHER.id[:12] in done.err
    assert served(fresh) == BLOCKS


def test_a_model_that_a_tier_does_not_take_keeps_no_other_away(
    stored: Path, tmp_path: Path, fresh: Path
) -> None:
    """Its folder is another user's."""
    words = ["copy", f"file://{tmp_path}/store", fresh, "--json"]
    for closed, other in ((OTHER, NAMESPACE), (NAMESPACE, OTHER)):  # be it the first or the last
        assert command(*words, "--namespace", closed.id).code == 0
        home = fresh.parent / "blocks" / closed.id
        home.chmod(0)
        done = command(*words, rights=False)
        home.chmod(0o700)
        assert done.code == 1
        assert f"namespace {closed.id[:12]} is skipped: cannot use" in done.err
        copied = {each["namespace"]: each["copied"] for each in json.loads(done.out)["namespaces"]}
        assert copied == {closed.id: 0, other.id: BLOCKS}
        assert command("clear", "-c", fresh, "--yes").code == 0
