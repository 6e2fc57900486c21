"""One NVMe folder, several processes: found by others, adopted from the dead, shared, bounded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine, LowDisk, child, expect, within

from kvtier.slab.files import is_empty, used_bytes
from kvtier.slab.folder import SlabFolder
from kvtier.slab.shares import reclaim, retaining
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, make_keys, sealed
from kvtier.types import Namespace, Outcome

OTHER = Namespace(facts={"model": "another"}, group_bytes=(8192,))


def test_slabs_of_the_dead_are_adopted_with_their_blocks(tmp_path: Path) -> None:
    keys = make_keys(8)
    with child(
        "engine = Engine(Path(sys.argv[1]), blocks=8); engine.put(make_keys(8))\n"
        "engine.tier.prepare_store(make_keys(2, start=50))\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        tmp_path / "kv",
    ) as victim:
        assert victim.wait() == -signal.SIGKILL
    heir = Engine(tmp_path / "kv", blocks=8)
    found = heir.read(keys)
    assert len(found) >= 6, "only the two that the dead had begun to replace may be gone"
    new = make_keys(8, start=100)
    assert heir.put(new) == new, "the heir may evict in what it adopted"
    assert heir.read(new) == new
    assert used_bytes(heir.root) <= heir.capacity


def test_a_slab_that_was_cut_short_keeps_its_room(tmp_path: Path) -> None:
    """What is written to it next makes it as long as before."""
    engine = Engine(tmp_path / "kv", blocks=16)
    engine.put(make_keys(16))
    slabs = set(engine.root.rglob("*.slab"))
    os.truncate(min(slabs), 0)
    engine.keeper._full_until = 0.0  # it has just been told that there is no room
    engine.tier.prepare_store(make_keys(1, start=100))
    engine.tier.refresh()
    assert set(engine.root.rglob("*.slab")) == slabs


@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER], ids=["same", "other"])
def test_who_comes_later_has_its_part_in_the_end(tmp_path: Path, namespace: Namespace) -> None:
    """Of the same model or of another: both store all the time, and the folder has been full."""
    rich = Engine(tmp_path / "kv", blocks=32)
    rich.put(make_keys(32))
    poor = Engine(tmp_path / "kv", blocks=32, namespace=namespace)
    for number in range(1, 41):
        poor.keeper._full_until = 0.0  # it tries again
        poor.put(make_keys(1, start=1000 * number))  # one round of its keeper
        rich.put(make_keys(1, start=1000 * number + 500))
    parts = [len(set(_places(engine))) for engine in (rich, poor)]
    assert sum(parts) <= 8
    assert min(parts) >= 3
    poor.keeper._full_until = 0.0
    new = poor.put(make_keys(8, start=100))
    assert rich.read(new) == (new if namespace is NAMESPACE else [])
    assert used_bytes(rich.root) <= rich.capacity
    assert not rich.keeper._shares.neighbours(rich.keeper.owner).lacking_room, "it has enough"


def _places(engine: Engine) -> list[int]:
    return [place.slab.id << 24 for place in engine.tier._places.by_slab.values() if place.mine]


def test_capacity_holds_while_three_processes_write(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    watcher = Engine(root, blocks=16)
    program = (
        "engine = Engine(Path(sys.argv[1]), blocks=16); start = int(sys.argv[2])\n"
        "for i in range(0, 60, 3): engine.put(make_keys(3, start=start + i))"
    )
    most = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(child(program, root, number * 1000)) for number in range(3)]
        while any(writer.poll() is None for writer in writers):
            most = max(most, used_bytes(root))
            watcher.keeper.work(thorough=True)
            watcher.tier.tick()
        assert all(writer.returncode == 0 for writer in writers)
    assert most <= watcher.capacity
    watcher.read([key for n in range(3) for key in make_keys(60, start=n * 1000)])


def test_what_idle_namespaces_hold_goes_after_their_empty_slabs(tmp_path: Path) -> None:
    old = Engine(tmp_path / "kv", blocks=16)
    old.put(make_keys(1))
    old.keeper.work()
    made = set(old.root.rglob("*.table"))
    assert len(made) == 2, "one of them is spare"
    (empty,) = (table for table in made if is_empty(table))
    old.close()
    os.utime(empty, (time.time() + 60,) * 2)  # it was made last
    folder = SlabFolder(old.root, OTHER, Disk())
    assert reclaim(folder, within(used_bytes(old.root) + 1), 2)
    assert set(old.root.rglob("*.table")) == made - {empty}


def test_what_idle_namespaces_retain_goes_last(tmp_path: Path) -> None:
    """Whole slabs go; the one that was used longest ago holds the block that is retained."""
    old = Engine(tmp_path / "kv", blocks=16)
    old.tier.retain_at_most(4)
    for start in range(0, 16, 4):
        old.put(make_keys(4, start=start))
    old.tier.retain(make_keys(1), "agent", time.time() + 600)
    old.tier._between_rounds()  # which writes that down
    old.close()
    full = {table for table in old.root.rglob("*.table") if not is_empty(table)}
    home = old.root / NAMESPACE.id
    (kept,) = retaining(home, full)
    os.utime(kept, (time.time() - 60,) * 2)
    folder = SlabFolder(old.root, OTHER, Disk())
    while len(left := full & set(old.root.rglob("*.table"))) > 1:
        assert reclaim(folder, within(used_bytes(old.root)), 1)
    assert left == {kept}
    assert reclaim(folder, within(used_bytes(old.root)), 1)
    assert not home.exists(), "to retain is a wish"


def test_who_only_reads_takes_no_room(tmp_path: Path) -> None:
    """Not from idle namespaces, nor ahead of what it would store."""
    old = Engine(tmp_path / "kv", blocks=8)
    old.put(make_keys(8))
    old.close()
    made = set(old.root.rglob("*.table"))
    for namespace, keys in ((OTHER, []), (NAMESPACE, make_keys(8))):
        reader = Engine(tmp_path / "kv", blocks=8, namespace=namespace, grows=False)
        reader.keeper.work(thorough=True)
        assert reader.read(make_keys(8)) == keys
        reader.close()
        assert set(old.root.rglob("*.table")) == made


def test_the_floor_stops_growth_and_gives_room_back(tmp_path: Path) -> None:
    disk = LowDisk()
    engine = Engine(tmp_path / "kv", blocks=16, disk=disk, free_floor=1 << 20)
    engine.put(make_keys(8))
    disk.free = 1 << 10
    before = used_bytes(engine.root)
    engine.tier.refresh()
    engine.tier.refresh()
    assert used_bytes(engine.root) < before
    disk.free = 1 << 40
    engine.keeper._full_until = 0.0
    new = make_keys(4, start=100)
    assert engine.put(new) == new


@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER], ids=["same", "other"])
def test_who_may_have_nothing_for_its_own_floor_takes_nothing_from_others(
    tmp_path: Path, namespace: Namespace
) -> None:
    """It would give up at once what it is handed, until nothing is left of anything."""
    rich = Engine(tmp_path / "kv", blocks=16)
    rich.put(make_keys(16))
    disk = LowDisk()
    disk.free = 1 << 30
    poor = Engine(rich.root, blocks=16, namespace=namespace, disk=disk, free_floor=2 << 30)
    for number in range(8):
        poor.keeper._full_until = 0.0
        assert poor.put(make_keys(1, start=100 + number)) == []
        rich.tier.refresh()
    assert rich.read(make_keys(16)) == make_keys(16)
    disk.free = 3 << 30
    for number in range(8):
        poor.keeper._full_until = 0.0
        poor.put(make_keys(1, start=200 + number))
        rich.tier.refresh()
    assert poor.own_slabs, "there is room for it again"


def test_an_engine_starts_on_a_full_disk_and_stores_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, b"")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    engine = Engine(tmp_path / "kv")
    keys = make_keys(4)
    assert engine.put(keys) == []
    assert [path.name for path in engine.keeper.folder.home.iterdir()] == ["owners"], (
        "nothing half made"
    )
    monkeypatch.undo()
    engine.keeper._full_until = 0.0
    assert engine.put(keys) == keys
    assert (engine.keeper.folder.home / "namespace.json").is_file()


def test_a_description_too_long_for_memory_is_replaced(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    path = engine.keeper.folder.home / "namespace.json"
    text = path.read_bytes()
    os.truncate(path, 1 << 43)
    engine.keeper.folder.establish()
    assert path.stat().st_size == len(text)
    assert path.read_bytes() == text


def test_who_cannot_say_that_it_starves_says_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rich = Engine(tmp_path / "kv")
    rich.put(make_keys(16))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        poor = Engine(tmp_path / "kv")
    poor.keeper.work(thorough=True)
    assert rich.keeper._shares.neighbours(rich.keeper.owner).lacking_room == {NAMESPACE.id}


@pytest.mark.parametrize("suffix", [".slab", ".table"])
def test_files_cut_short_while_open_cost_blocks_only(tmp_path: Path, suffix: str) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(8)
    engine.put(keys)
    for path in (tmp_path / "kv").rglob(f"*{suffix}"):
        os.truncate(path, 5000)
    engine.read(keys)
    new = make_keys(8, start=100)
    engine.put(new)
    engine.read(new + keys)
    engine.close()
    after = Engine(tmp_path / "kv")
    after.read(new + keys)
    fresh = make_keys(4, start=200)
    after.keeper._full_until = 0.0
    assert after.put(fresh) == fresh


def test_a_stopped_process_delays_nobody(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    keys = make_keys(3)
    engine.put(keys)
    with child(
        "import fcntl\nfd = os.open(sys.argv[1] + '/lock', os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX); print('holding', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)",
        tmp_path / "kv",
    ) as holder:
        expect(holder, "holding")
        reservation = engine.tier.prepare_store(make_keys(1, start=50))
        assert len(reservation.keys) == 1, "storing needs no lock"
        failed = dict.fromkeys(reservation.keys, Outcome.CANCELLED)
        engine.tier.complete_store(reservation.keys, failed)
        found = engine.tier.lookup(keys)
        assert [each.value for each in found] == ["hit"] * 3
    fd = os.open(tmp_path / "kv" / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel let go of it
    os.close(fd)


def test_what_is_not_to_be_kept_is_gone_after_a_crash(tmp_path: Path) -> None:
    with child(
        "engine = Engine(Path(sys.argv[1]), discard=True); engine.put(make_keys(4))\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        tmp_path / "kv",
    ) as victim:
        assert victim.wait() == -signal.SIGKILL
    after = Engine(tmp_path / "kv")
    assert after.hits(make_keys(4)) == []


def test_what_landed_and_was_given_up_is_found_by_nobody(tmp_path: Path) -> None:
    """A transfer may end well for a block that was forgotten, or found bad, meanwhile."""
    mine, other = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(2)
    reservation = mine.tier.prepare_store(keys)
    stored = mine.handler.store(reservation.spec, keys, [sealed(key) for key in keys])
    assert stored == [Outcome.OK] * 2
    mine.tier.complete_store(keys, {keys[0]: Outcome.CANCELLED})
    mine.tier.flush()
    assert other.hits(keys) == keys[1:]
    mine.close()
    other.close()
    again = Engine(tmp_path / "kv", blocks=8)
    assert again.hits(keys) == keys[1:]


def test_what_keeps_a_model_from_being_found_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After an upgrade, say: the first thing to ask where everything misses."""

    def described(**facts: str) -> Namespace:
        return Namespace(facts=facts, group_bytes=(8192,))

    old = described(model="./model", engine="vllm 1", dtype="half")
    new = described(model="/models/model/", engine="vllm 2\x1b[2J", dtype="half")
    foreign = described(model="another", engine="vllm 1", dtype="half")
    for namespace in (foreign, old, described(dtype="half")):
        Engine(tmp_path / "kv", namespace=namespace).close()
    (tmp_path / "kv" / ("0" * 32)).mkdir()
    os.mkfifo(tmp_path / "kv" / ("0" * 32) / "namespace.json")
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for number, text in enumerate((b"\xff" * 100, deep), 1):
        hostile = tmp_path / "kv" / (str(number) * 32)
        hostile.mkdir()
        (hostile / "namespace.json").write_bytes(text)
    assert not caplog.records
    for _ in range(2):
        Engine(tmp_path / "kv", namespace=new).close()
    assert caplog.messages == [
        f"{tmp_path}/kv has nothing of this model as it is now, and what it has does not fit: "
        "engine: vllm 2\ufffd[2J here, vllm 1 there; model: /models/model/ here, ./model there"
    ]
