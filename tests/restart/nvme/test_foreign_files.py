"""What lies in an NVMe folder and is no slab of this namespace, or no whole one."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine

from kvtier.errors import MediumError
from kvtier.slab import layout
from kvtier.slab.files import halves, hold_owner, homes
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace

OTHER = Namespace(facts={"model": "another"}, group_bytes=(8192,))


@pytest.mark.parametrize("running", [True, False])
def test_slabs_whose_data_somebody_removed_are_made_anew(tmp_path: Path, running: bool) -> None:
    """Their tables would stay for ever otherwise, and be offered room in that is not there."""
    engine = Engine(tmp_path / "kv", blocks=8)
    engine.put(make_keys(8))
    tables = list((tmp_path / "kv").rglob("*.table"))
    if not running:
        engine.close()
    for path in (tmp_path / "kv").rglob("*.slab"):
        path.unlink()
    if not running:
        engine = Engine(tmp_path / "kv", blocks=8)
    engine.handler.close()  # as if the mover had been started again
    assert engine.read(make_keys(8)) == []
    engine.keeper._full_until = 0.0
    fresh = make_keys(8, start=100)
    assert engine.put(fresh) == fresh
    assert engine.read(fresh) == fresh
    assert not any(path.exists() for path in tables)


def test_broken_slabs_are_removed_and_newer_ones_left_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=16)
    engine.put(make_keys(12))
    engine.close()
    tables = sorted((tmp_path / "kv").rglob("*.table"))
    with tables[0].open("r+b") as file:
        file.write(b"\0" * 64)
    with tables[1].open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<H", layout.VERSION + 1))
    after = Engine(tmp_path / "kv", blocks=16)
    after.tier.refresh()
    assert not tables[0].exists()
    assert tables[1].exists()
    assert after.read(make_keys(12)), "the whole ones are served"


def test_a_slab_that_looks_broken_is_left_while_somebody_else_may_be_at_work(
    tmp_path: Path,
) -> None:
    """Its owner, say, whose disk answers this process wrongly."""
    mine, neighbour = Engine(tmp_path / "kv", blocks=8), Engine(tmp_path / "kv", blocks=8)
    assert neighbour.put(make_keys(2))
    (slab,) = neighbour.own_slabs
    table = neighbour.keeper.folder.table_path(slab)
    with table.open("r+b") as file:
        file.write(b"\0" * 64)
    for _ in range(2):
        mine.tier.refresh()
        assert table.exists()
    neighbour.close()
    mine.tier.refresh()
    assert not table.exists()


@pytest.mark.parametrize("kind", ["slab", "table"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, kind: str) -> None:
    """Somebody else may have made this folder, or what it was unpacked from."""
    engine = Engine(tmp_path / "kv", blocks=8)
    engine.put(make_keys(8))
    engine.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (tmp_path / "kv").rglob(f"*.{kind}"):
        path.rename(outside / path.name)
        path.symlink_to(outside / path.name)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    after = Engine(tmp_path / "kv", blocks=8)
    after.put(make_keys(8, start=100))
    after.tier.clear()
    after.tier.refresh()
    after.close()
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


@pytest.mark.parametrize("moved", ["from another namespace", "to another number"])
def test_slabs_that_lie_where_they_do_not_belong_are_not_offered(
    tmp_path: Path, moved: str
) -> None:
    namespace, named = (NAMESPACE, "00abcdef") if "number" in moved else (OTHER, "")
    engine = Engine(tmp_path / "kv", blocks=4, namespace=namespace)
    assert engine.put(make_keys(4)) == make_keys(4)
    engine.close()
    home = tmp_path / "kv" / NAMESPACE.id
    home.mkdir(exist_ok=True)
    for path in [*(tmp_path / "kv").rglob("*.table"), *(tmp_path / "kv").rglob("*.slab")]:
        path.rename(home / f"{named or path.stem}{path.suffix}")
    after = Engine(tmp_path / "kv", blocks=4)
    assert after.hits(make_keys(4)) == []
    assert after.put(make_keys(4)) == make_keys(4)
    assert after.read(make_keys(4)) == make_keys(4)


def test_only_the_dead_lose_what_they_had_begun(tmp_path: Path) -> None:
    home = tmp_path / "kv" / NAMESPACE.id
    (home / "owners").mkdir(parents=True)
    files = {}
    for owner in (0xDEAD, 0xA11FE):
        (home / "owners" / f"{owner:08x}").touch()
        files[owner] = home / f"00000077.{owner:08x}.data.making"
        files[owner].touch()
    alive = hold_owner(home / "owners", 0xA11FE)
    engine = Engine(tmp_path / "kv")
    engine.put(make_keys(1))
    assert not files[0xDEAD].exists()
    assert files[0xA11FE].exists()
    engine.close()
    os.close(alive)


def test_what_only_looks_like_a_slab_stops_nothing(tmp_path: Path) -> None:
    home = tmp_path / "kv" / NAMESPACE.id
    (home / "11111111.table").mkdir(parents=True)
    os.mkfifo(home / "22222222.table")
    (home / "33333333.table").symlink_to("nowhere")
    (home / "44444444.slab").mkdir()
    (home / "55555555.66666666.data.making").mkdir()
    (home / "owners" / "77777777").mkdir(parents=True)
    other = tmp_path / "kv" / ("ab" * 16)
    (other / "owners" / "88888888").mkdir(parents=True)
    (other / "99999999.table").mkdir()
    (other / "namespace.json").write_text("{}")
    engine = Engine(tmp_path / "kv")
    assert engine.put(make_keys(24)) == make_keys(24), "though there is nothing to reclaim"
    engine.close()
    again = Engine(tmp_path / "kv")
    assert again.read(make_keys(8, start=16)) == make_keys(8, start=16)


def test_what_is_removed_gives_its_room_back_although_somebody_has_it_open(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=4)
    keys = make_keys(4)
    assert engine.put(keys) == keys
    folder, (slab,) = engine.keeper.folder, engine.own_slabs
    with folder.data_path(slab).open("rb") as opened:
        folder.remove_slab(slab)
        assert os.fstat(opened.fileno()).st_size == 0


def test_what_has_another_name_elsewhere_keeps_what_is_in_it(tmp_path: Path) -> None:
    """A copy of the folder, say, that shares its files with it until they go here."""
    engine = Engine(tmp_path / "kv", blocks=8)
    keys = make_keys(8)
    assert engine.put(keys) == keys
    engine.handler.close()
    shutil.copytree(tmp_path / "kv", tmp_path / "copy", copy_function=os.link)
    engine.tier.clear()
    engine.tier.refresh()
    assert engine.hits(keys) == []
    engine.close()
    copy = Engine(tmp_path / "copy", blocks=8)
    assert copy.read(keys) == keys


def test_what_a_link_in_the_root_leads_to_is_nobodys_to_clear_away(tmp_path: Path) -> None:
    elsewhere = Engine(tmp_path / "elsewhere", namespace=OTHER)
    elsewhere.put(make_keys(4))
    elsewhere.close()
    mine = Engine(tmp_path / "kv")
    (mine.root / OTHER.id).symlink_to(elsewhere.root / OTHER.id)
    assert homes(mine.root) == [mine.keeper.folder.home]


@pytest.mark.parametrize("whose", [NAMESPACE, OTHER])
def test_what_bears_no_owners_name_or_lies_behind_a_link_is_no_mark(
    tmp_path: Path, whose: Namespace
) -> None:
    """Who may make a folder here could have others' files removed by that otherwise."""
    outside = tmp_path / "outside"
    outside.mkdir()
    theirs = [outside / "letters", outside / "0badcafe"]
    for path in theirs:
        path.touch()
    home = tmp_path / "kv" / whose.id
    home.mkdir(parents=True)
    note = home / "owners" / "note.txt"
    if whose == OTHER:
        (home / "owners").symlink_to(outside)
    else:
        (home / "owners").mkdir()
        theirs.append(note)
        note.touch()
    engine = Engine(tmp_path / "kv")
    assert engine.put(make_keys(4)) == make_keys(4)
    assert all(path.exists() for path in theirs)


@pytest.mark.parametrize("what", [NAMESPACE.id, f"{NAMESPACE.id}/owners"])
def test_a_link_in_the_place_of_its_own_folder_is_refused(tmp_path: Path, what: str) -> None:
    """Nobody would count what lies behind it, so it would grow without end."""
    link = tmp_path / "kv" / what
    link.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MediumError, match=f"{what} is a link"):
        Engine(tmp_path / "kv")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_half_a_slab_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", blocks=8)
    assert engine.put(make_keys(8))
    home = engine.keeper.folder.home
    engine.close()
    newer, older = sorted(home.glob("*.table"))
    with newer.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<H", layout.VERSION + 1))
    for path in home.glob("*.slab"):
        path.unlink()
    assert halves(home) == [older]
