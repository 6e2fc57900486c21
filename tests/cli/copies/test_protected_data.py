"""What commands leave alone though it lies where they work: what they cannot judge, what somebody
has begun to use, what was never asked about."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes.cli_world import command

from kvtier import Stack
from kvtier.backends.cpu import Region
from kvtier.backends.object import handler
from kvtier.backends.object.inspection.store_access import left_behind, new_probe, remove_left
from kvtier.backends.object.object_names import SERVERS, description_name, uses_prefix
from kvtier.backends.object.settings import open_for
from kvtier.cli import clear as gc
from kvtier.cli.inspect import look
from kvtier.config import load
from kvtier.inspect import Proof, Reporter
from kvtier.inspect.inspector import BENCH_MARK
from kvtier.record.record import Header
from kvtier.settings import Duration, WritePolicy
from kvtier.slab import layout
from kvtier.slab.files import hold_owner
from kvtier.slab.folder_inspect import sparing
from kvtier.slab.inspect import Slab
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import Namespace

BLOCKS = 8
OTHER = Namespace(facts={"model": "another"}, group_bytes=(4096,))


def with_store(stack_file: Path, tmp_path: Path) -> Path:
    """A store in a folder whose objects are compressed."""
    store = f'  - {{kind: object, capacity: 64MiB, codec: zstd, url: "file://{tmp_path}/store"}}\n'
    stack_file.write_text(stack_file.read_text() + store)
    return stack_file


@pytest.fixture
def stored(stack_file: Path, tmp_path: Path) -> Path:
    """A stack with blocks in its store, too."""
    with Stack.open(with_store(stack_file, tmp_path), NAMESPACE) as stack:
        stack.store({key: bytes(NAMESPACE.payload_bytes) for key in make_keys(BLOCKS)})
        assert stack.settle()
    return stack_file


def objects(stack_file: Path) -> list[str]:
    settings: Any = load(stack_file).tiers[2]
    with closing(open_for(settings)) as store:
        return [info.name for info in store.list() if "/blocks/" in info.name]


def test_blocks_that_nothing_describes_are_not_bad(stored: Path, tmp_path: Path) -> None:
    """How long they are unpacked is not known: that is no proof against them."""
    (tmp_path / "store" / description_name(NAMESPACE.id)).unlink()
    done = command("verify", "-c", stored, "--tier", "object", "--repair")
    assert done.code == 1
    assert "nothing says" in done.err
    assert len(objects(stored)) == BLOCKS


def test_what_is_said_to_clear_a_folder_clears_no_store(stored: Path, tmp_path: Path) -> None:
    """Which all servers share, while only this machine's disk lost what describes its blocks."""
    home = tmp_path / "disk" / "blocks" / NAMESPACE.id
    (home / "namespace.json").write_text("")
    said = re.search("kvtier (clear .+) removes its blocks", command("ls", "-c", stored).said)
    assert said is not None
    before = objects(stored)
    done = command(*said[1].split(), "-c", stored, "--yes")
    assert (done.code, done.err) == (0, "")
    assert not home.exists()
    assert objects(stored) == before


def test_a_look_writes_no_folder(stack_file: Path, tmp_path: Path) -> None:
    stack = with_store(stack_file, tmp_path)
    done = command("gc", "-c", stack, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert not (tmp_path / "store").exists()


def test_an_idle_namespace_of_a_store_that_is_served_again(stored: Path, tmp_path: Path) -> None:
    config = load(stored)
    places = look(config, 2)
    assert places[0].contents.parts[0].newest is not None
    places[0].contents.parts[0].newest = 1.0
    places[0]._survey.served.clear()
    idle = next(iter(gc.find_garbage(places, 3600.0)))
    assert "nobody used" in idle.what
    assert not idle.remove()
    assert len(objects(stored)) == BLOCKS
    # Manifests are young: servers of others write them.
    for path in (tmp_path / "store").rglob("*"):
        if path.name == "namespace.json" or (path.is_file() and "uses" in path.parts):
            os.utime(path, (0, 0))
    settings: Any = config.tiers[2]
    for name in (f"{SERVERS}{NAMESPACE.id}-x", f"{uses_prefix(NAMESPACE.id)}x"):
        with closing(open_for(settings)) as store:
            store.put(name, [memoryview(b"x")])
        assert not idle.remove()
        os.utime(tmp_path / "store" / name, (0, 0))
    assert idle.remove()
    assert objects(stored) == []


def test_what_lies_behind_a_link_is_somebody_elses(stack_file: Path, tmp_path: Path) -> None:
    """Though the link has a namespace's name."""
    theirs = tmp_path / "theirs" / "0000aaaa.0000bbbb.data.making"
    (theirs.parent / "owners").mkdir(parents=True)
    theirs.touch()
    blocks = tmp_path / "disk" / "blocks"
    blocks.mkdir()
    (blocks / NAMESPACE.id).symlink_to(theirs.parent)
    config = load(stack_file)
    assert list(gc.find_garbage(look(config, 1), 0.0)) == []


@pytest.mark.slow
def test_a_mark_that_may_not_be_tried_hides_no_other_garbage(stored: Path, tmp_path: Path) -> None:
    """As where root has filled a folder once, and was killed."""
    home = tmp_path / "disk" / "blocks" / NAMESPACE.id
    odd = home / "owners" / "0000bbbb"
    odd.touch(mode=0)
    other = home.with_name("ff" * 16)
    other.mkdir()
    left = other / "0000aaaa.0000cccc.data.making"
    left.touch()
    for path in (tmp_path / "store").rglob("*-0"):
        os.utime(path, (0, 0))
    stored.write_text(stored.read_text().replace("codec: zstd", "age_max: 1d"))
    dry, done = (command("gc", "-c", stored, *words, rights=False) for words in (["--dry-run"], []))
    assert (dry.code, done.code) == (1, 1)
    assert f"{odd}: Permission denied" in done.err
    assert f"{BLOCKS} blocks that are too old" in dry.out
    assert f"{BLOCKS} blocks that are too old" in done.out
    assert not left.exists()
    assert not objects(stored)
    assert odd.exists()


def test_what_others_put_beside_regions_is_not_gcs(stack_file: Path, tmp_path: Path) -> None:
    """All users share /dev/shm, and nobody can remove there what is another's."""
    theirs = tmp_path / "host" / f"kvtier-{os.getuid()}-theirs-1.making"
    theirs.mkdir()
    done = command("gc", "-c", stack_file)
    assert done.code == 0, done.err
    assert list((tmp_path / "host").iterdir()) == [theirs]


def test_marks_behind_a_link_are_somebody_elses(stack_file: Path, tmp_path: Path) -> None:
    """Who may write to a folder must not choose what others, root say, remove elsewhere."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "letters").touch()
    (theirs / "0000aaaa").touch()
    home = tmp_path / "disk" / "blocks" / NAMESPACE.id
    home.mkdir(parents=True)
    (home / "owners").symlink_to(theirs)
    config = load(stack_file)
    assert list(gc.find_garbage(look(config, 1), None)) == []


def test_a_slab_in_the_folder_of_another_model_is_not_that_models(filled: Path) -> None:
    (nvme,) = look(load(filled), 1)
    home = nvme.slabs[0].table.parent
    shutil.copytree(home, home.with_name(OTHER.id))
    (home.with_name(OTHER.id) / "namespace.json").write_bytes(OTHER.to_json())
    (now,) = look(load(filled), 1)
    assert [(part.namespace, part.blocks) for part in now.contents.parts] == [
        (NAMESPACE.id, BLOCKS)
    ]
    assert {path.parent.name for path in now.broken} == {OTHER.id}


def test_slabs_made_ahead_go_unless_somebody_has_them_or_a_newer_version_made_them(
    filled: Path,
) -> None:
    (nvme,) = look(load(filled), 1)
    empty = [slab.table for slab in nvme.slabs if not blocks_in(slab)]
    assert empty
    texts = [table.read_bytes() for table in empty]
    version = len(layout.MAGIC)
    for table, text in zip(empty, texts, strict=True):
        table.write_bytes(text[:version] + b"\xff\xff" + text[version + 2 :])
    with sparing(Path(nvme.contents.where), NAMESPACE):
        assert all(table.exists() for table in empty)
    for table, text in zip(empty, texts, strict=True):
        table.write_bytes(text)
    owners = empty[0].parent / "owners"
    fds = []
    for slab in nvme.slabs:
        (owners / slab.owner).touch()
        fds.append(hold_owner(owners, int(slab.owner, 16)))
    with sparing(Path(nvme.contents.where), NAMESPACE):
        assert all(table.exists() for table in empty)
    for fd in fds:
        os.close(fd)
    with sparing(Path(nvme.contents.where), NAMESPACE):
        assert not any(table.exists() for table in empty)


def test_a_model_is_in_use_if_one_of_its_slabs_is(filled: Path) -> None:
    (nvme,) = look(load(filled), 1)
    nvme.slabs[0].in_use = True
    nvme.count(nvme.contents)
    assert [part.in_use for part in nvme.contents.parts] == [True]


@pytest.mark.parametrize("into", ["memory", "cpu"])
def test_no_tier_is_filled_that_keeps_nothing(filled: Path, into: str) -> None:
    text = filled.read_text() + "  - {kind: memory, capacity: 4MiB}\n"
    filled.write_text(text.replace("kind: cpu,", "kind: cpu, persistence: discard,"))
    done = command("prewarm", "-c", filled, "--into", into)
    assert (done.code, "keeps nothing" in done.err) == (1, True)


def test_an_object_is_not_unpacked_that_is_larger_than_its_model_says(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(stored)
    (place,) = look(config, 2)
    block = next(place.blocks())
    settings: Any = config.tiers[2]
    with closing(open_for(settings)) as store:
        record = memoryview(bytearray(block.bytes))
        store.get(block.where, record)
        header = Header.read(record)
        header.payload_bytes *= 2
        header.write(record)
        store.put(block.where, [record])
    monkeypatch.setattr(handler, "decode", lambda *_: pytest.fail("it was unpacked"))
    verdict = place.prover(place.contents.namespaces).prove(block)
    assert (verdict.proof, "does not fit" in verdict.why) == (Proof.BAD, True)


def test_no_memory_is_taken_for_an_object_that_is_too_large_for_a_record(
    stored: Path, tmp_path: Path
) -> None:
    config = load(stored)
    (place,) = look(config, 2)
    os.truncate(tmp_path / "store" / next(place.blocks()).where, 1 << 42)
    (place,) = look(config, 2)
    large = next(block for block in place.blocks() if block.bytes == 1 << 42)
    verdict = place.prover(place.contents.namespaces).prove(large)
    assert (verdict.proof, "is no record" in verdict.why) == (Proof.BAD, True)


def test_what_somebody_tries_a_store_with_again_stays(stored: Path, tmp_path: Path) -> None:
    settings: Any = load(stored).tiers[2]
    name = new_probe()
    with closing(open_for(settings)) as store:
        store.put(name, [memoryview(b"12345")])
        os.utime(tmp_path / "store" / name, (0, 0))
        assert left_behind(settings) == {name: 5}
        store.put(name, [memoryview(b"12345")])
        assert not remove_left(settings, name, Reporter())
        assert store.head(name) is not None


def test_a_model_of_which_one_slab_was_used_is_not_idle(filled: Path) -> None:
    config = load(filled)
    (nvme,) = look(config, 1)
    tables = [slab.table for slab in nvme.slabs]
    assert len(tables) > 1
    for young in tables:
        for table in tables:
            os.utime(table, None if table == young else (0, 0))
        assert list(gc.find_garbage([nvme], 3600.0)) == []


def test_of_slabs_beyond_the_capacity_the_oldest_go_and_no_more_than_must(filled: Path) -> None:
    config = load(filled)
    (nvme,) = look(config, 1)
    first, oldest, *others = nvme.slabs
    for age, slab in enumerate((*others, first, oldest)):
        os.utime(slab.table, (1e9 - age, 1e9 - age))
    nvme.contents.capacity = nvme.contents.used - oldest.size
    assert [each.where for each in gc.find_garbage([nvme], None)] == [str(oldest.data)]
    nvme.contents.capacity -= 1
    found = [each.where for each in gc.find_garbage([nvme], None)]
    assert found == [str(oldest.data), str(first.data)]


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.NEVER])
def test_who_only_reads_has_no_say_in_how_much_others_keep_and_for_how_long(
    stored: Path, tmp_path: Path, write: WritePolicy
) -> None:
    found = load(stored)
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (0, 0))
    host, nvme, store = found.tiers
    nvme = msgspec.structs.replace(nvme, write=write)
    store = msgspec.structs.replace(store, write=write, age_max=Duration(1.0))
    config = msgspec.structs.replace(found, tiers=(host, nvme, store))
    places = look(config)
    places[1].contents.capacity = places[1].contents.used - 1
    goes = [each.what for each in gc.find_garbage(places, None)]
    beyond = ["slab beyond the capacity, written longest ago", f"{BLOCKS} blocks that are too old"]
    expected = [] if write is WritePolicy.NEVER else beyond
    assert [each.partition(" or over")[0] for each in goes] == expected


def test_host_memory_that_somebody_maps_is_in_use(filled: Path) -> None:
    """An engine's workers outlive its scheduler by a moment."""
    with Stack.open(filled, NAMESPACE) as stack:
        mapped = Region.attach(stack.host.region.path)  # type: ignore[attr-defined]
    (cpu,) = look(load(filled), 0)
    (part,) = cpu.contents.parts
    assert part.in_use
    assert ["in use" in each.kept for each in cpu.clear(part)] == [True]
    mapped.close()
    (cpu,) = look(load(filled), 0)
    assert [each.kept for each in cpu.clear(part)] == [""]
    assert cpu.look().parts == []


def test_garbage_that_goes_makes_room_for_slabs(filled: Path, tmp_path: Path) -> None:
    """Slabs go only for what is beyond the capacity without it."""
    config = load(filled)
    bench = tmp_path / "disk" / "blocks" / f"{BENCH_MARK}1-x"
    bench.mkdir()
    (bench / "slab").write_bytes(bytes(1 << 20))
    os.utime(bench, (0, 0))
    left = tmp_path / "disk" / "blocks" / NAMESPACE.id / "0000aaaa.0000bbbb.data.making"
    left.write_bytes(bytes(1 << 20))
    (nvme,) = look(config, 1)
    nvme.contents.capacity = nvme.contents.used - (2 << 20)
    assert sorted(each.what for each in gc.find_garbage([nvme], None)) == [
        "file that a dead process was making",
        "folder of a measurement that was killed",
    ]


@pytest.mark.slow
def test_host_memory_of_another_model_is_not_replaced(filled: Path, tmp_path: Path) -> None:
    other = tmp_path / "another.yaml"
    other.write_text(filled.read_text().replace("name: cli", "name: another"))
    with Stack(load(other), OTHER) as stack:
        key = make_keys(1)[0]
        stack.store({key: payload(key, OTHER)})
        assert stack.settle()
    done = command("prewarm", "-c", filled, "--into", "cpu", "--namespace", OTHER.id)
    assert done.code == 1
    assert "kvtier clear" in done.err
    (place,) = look(load(filled), 0)
    found = [(part.namespace, part.blocks) for part in place.contents.parts]
    assert found == [(NAMESPACE.id, BLOCKS)]
    assert command("clear", "-c", filled, "--tier", "cpu", "--yes").code == 0
    assert command("prewarm", "-c", filled, "--into", "cpu", "--namespace", OTHER.id).code == 0


def blocks_in(slab: Slab) -> int:
    return int((slab.entries()["state"] != 0).sum())


@pytest.mark.slow
def test_a_snapshot_of_which_all_is_gone_is_no_success(stored: Path, tmp_path: Path) -> None:
    """As where a rule of the bucket deletes what is old: what told of the blocks is still there."""
    for path in (tmp_path / "store").rglob("*-0"):
        path.unlink()
    assert command("clear", "-c", stored, "--tier", "nvme", "--yes").code == 0
    done = command("copy", stored, stored, "--tier", "object")
    assert done.code == 1
    assert "are gone" in done.err
