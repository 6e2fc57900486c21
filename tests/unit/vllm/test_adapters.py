"""What stands in the keys for LoRA adapters: which bytes, and whether they are those that an engine
has read."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.scheduler.tensors import write_tensors

from kvtier.vllm.identity import weight_fingerprints
from kvtier.vllm.identity.weight_fingerprints import Adapters


def adapter(folder: Path, value: int) -> Path:
    write_tensors(folder, bytes([value]) * 64, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return folder


def named(folder: Path, number: int = 1, in_place: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_path=str(folder), lora_int_id=number, load_inplace=in_place)


def test_an_adapter_is_known_by_its_bytes(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    salts = Adapters()
    assert salts.salt(one) == salts.salt(one) == Adapters().salt(one)
    assert salts.salt(one) != salts.salt(other)


def test_an_adapters_settings_count(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 1)
    before = Adapters().salt(folder)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert Adapters().salt(folder) != before


def test_nobody_knows_an_adapter_that_changes_under_the_engine(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 1)
    salts = Adapters()
    assert salts.salt(folder)
    adapter(folder, 2)
    os.utime(folder / "adapter_model.safetensors", ns=(0, 0))
    assert salts.salt(folder) is None
    assert salts.salt(folder) is None


def test_what_was_being_stored_when_an_adapter_changed_is_not_vouched_for(tmp_path: Path) -> None:
    folder, salts = adapter(tmp_path / "a", 1), Adapters()
    assert salts.began("request", named(folder))
    for errand in (1, 2):
        salts.stores("request", errand)
    salts.ended("request")
    salts.stores("request", 3)
    assert salts.vouches([1])
    adapter(folder, 2)
    os.utime(folder / "adapter_model.safetensors", ns=(0, 0))
    assert [salts.vouches([errand]) for errand in (1, 2, 3)] == [True, False, True]


def test_an_adapter_is_looked_at_once_for_all_that_was_stored_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (adapter(tmp_path / each, ord(each)) for each in "ab")
    looks, plain = list[Path](), weight_fingerprints.adapter_files
    salts = Adapters()
    for errand in range(32):
        salts.began(f"request-{errand}", named(one) if errand % 2 else named(other, number=2))
        salts.stores(f"request-{errand}", errand)
    monkeypatch.setattr(
        weight_fingerprints, "adapter_files", lambda of: looks.append(of) or plain(of)
    )
    assert salts.vouches(range(64))
    assert sorted(looks) == [one, other]
    assert salts.vouches(range(64))
    assert len(looks) == 2, "none has an errand any more"


def test_nobody_knows_which_of_two_adapters_of_one_number_is_meant(tmp_path: Path) -> None:
    one, other, third = (adapter(tmp_path / each, ord(each)) for each in "abc")
    salts = Adapters()
    assert salts.began("request", named(one))
    salts.stores("request", 1)
    salts.read(named(other, in_place=True))
    assert not salts.vouches([1]), "it goes on with the other"
    assert salts.began("later", named(other))
    assert salts.began("confused", named(third)) is None, "it gets the other"
    assert salts.began("fourth", named(third, number=2)) is None
    for request in ("request", "later", "confused", "fourth"):
        salts.ended(request)

    salts = Adapters()
    assert salts.began("first", named(one))
    salts.removed(1)
    assert salts.began("too early", named(other)) is None
    salts = Adapters()
    assert salts.began("first", named(one))
    salts.ended("first")
    salts.removed(1)
    assert salts.began("second", named(other))


def test_that_nothing_is_kept_for_an_adapter_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests with the first may come yet when the other has its number."""
    folders = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)]
    salts = Adapters()
    for turn in range(6):
        assert salts.began(str(turn), named(folders[turn % 2])) is None or not turn
    said = [record.getMessage() for record in caplog.records]
    assert [sum(f"the adapter in {folder}" in each for each in said) for folder in folders] == [
        1,
        1,
    ]


def test_an_adapter_that_is_not_to_be_seen_is_another_when_it_is_read_again(tmp_path: Path) -> None:
    salts = Adapters()
    found = [salts.began("a", named(tmp_path)), salts.began("b", named(tmp_path, number=2))]
    salts.read(named(tmp_path, number=2))
    found += [salts.began("c", named(tmp_path, number=2)), Adapters().began("d", named(tmp_path))]
    assert len(set(found) - {None}) == 4
    assert salts.began("e", named(tmp_path, number=2)) == found[2]
    assert salts.began("f", named(tmp_path, number=2, in_place=True)) is None, "in each step anew"


def test_nobody_knows_an_adapter_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").symlink_to(folder / "nowhere")
    salts = Adapters()
    assert salts.salt(folder) is None
    (folder / "adapter_model.safetensors").unlink()
    adapter(folder, 1)
    assert salts.salt(folder) is None, "who knows what the engine has loaded"


def test_an_adapter_that_is_not_to_be_seen_is_for_one_process(tmp_path: Path) -> None:
    salts = Adapters()
    assert salts.salt(tmp_path) == salts.salt(tmp_path) != Adapters().salt(tmp_path)
    adapter(tmp_path, 1)
    assert salts.salt(tmp_path) is None


def test_files_that_hang_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept meanwhile, and none of those that come is a reason to wait again."""
    folder, reads, looks = adapter(tmp_path / "a", 1), threading.Event(), list[Path]()
    plain = weight_fingerprints.adapter_files

    def hangs(of: Path) -> list[tuple[Path, int]]:
        looks.append(of)
        assert reads.wait(20.0)
        return plain(of)

    monkeypatch.setattr(weight_fingerprints, "adapter_files", hangs)
    salts = Adapters(patience_s=0.01)
    assert [salts.salt(folder) for _ in range(3)] == [None] * 3
    reads.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-adapter":
            thread.join()
    assert looks == [folder]
    salts._patience_s = 20.0
    assert salts.salt(folder) == Adapters().salt(folder)
