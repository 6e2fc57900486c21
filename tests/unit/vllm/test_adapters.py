"""What stands in the keys for LoRA adapters: which bytes, and whether they are those that an engine
has read."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scheduler.tensors import write_tensors

from kvtier.vllm.identity import lora_adapters
from kvtier.vllm.identity.lora_adapters import Adapters
from kvtier.vllm.protocol import Report


def adapter(folder: Path, value: int) -> Path:
    write_tensors(folder, bytes([value]) * 64, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return folder


def named(folder: Path, number: int = 1, in_place: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_path=str(folder), lora_int_id=number, load_inplace=in_place)


_names = itertools.count()


class Engine:
    """Asks as an engine does, and waits for looks where that asks again in its next step."""

    def __init__(self, look_wait_s: float = 60.0) -> None:
        self.adapters = Adapters(look_wait_s)

    def request(self, adapter: Any, name: str = "") -> bytes | None:
        """The salt for a request that has just come."""
        name = name or f"request-{next(_names)}"
        self.adapters.arrived(name, adapter)
        while self.adapters.awaits(name):
            pass
        return self.adapters.take_salt(name)

    def salt(self, folder: Path) -> bytes | None:
        return self.request(named(folder))

    def vouches(self, *worker_jobs: int) -> bool:
        """Whether all of these stores, which have just ended, count."""
        held = [
            worker_job for worker_job in worker_jobs if self.adapters.holds(worker_job, Report(1))
        ]
        stored = list[tuple[int, Report, bool]]()
        while len(stored) < len(held):
            stored += self.adapters.take_stored()
        assert [worker_job for worker_job, _, _ in stored] == held
        return all(vouched for _, _, vouched in stored)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.adapters.close()


def fresh(folder: Path) -> bytes | None:
    """The salt that another engine finds for an adapter."""
    other = Engine()
    salt = other.salt(folder)
    other.adapters.close()
    return salt


def change(folder: Path) -> None:
    adapter(folder, 2)
    os.utime(folder / "adapter_model.safetensors", ns=(0, 0))


def test_an_adapter_is_known_by_its_bytes(engine: Engine, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    assert engine.salt(one) == engine.salt(one) == fresh(one)
    assert engine.request(named(other, number=2)) not in (None, engine.salt(one))


def test_an_adapters_settings_count(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 1)
    before = fresh(folder)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert fresh(folder) != before


def test_nobody_knows_an_adapter_that_changes_under_the_engine(
    engine: Engine, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "a", 1)
    assert engine.salt(folder)
    change(folder)
    assert engine.salt(folder) is None
    assert engine.salt(folder) is None


def test_what_was_being_stored_when_an_adapter_changed_is_not_vouched_for(
    engine: Engine, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "a", 1)
    assert engine.request(named(folder), "request")
    for worker_job in (1, 2):
        engine.adapters.stores("request", worker_job)
    engine.adapters.ended("request")
    engine.adapters.stores("request", 3)
    assert engine.vouches(1)
    change(folder)
    assert [engine.vouches(worker_job) for worker_job in (1, 2, 3)] == [True, False, True]


class Files:
    """Lets looks at files pass, or holds them, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks, self.reached = list[Path](), threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._plain = lora_adapters.adapter_files
        monkeypatch.setattr(lora_adapters, "adapter_files", self._look)

    def _look(self, of: Path) -> list[tuple[Path, int]]:
        self.looks.append(of)
        self.reached.set()
        assert self.gate.wait(60.0)
        return self._plain(of)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


def test_an_adapter_is_looked_at_once_for_all_that_was_stored_in_a_step(
    engine: Engine, files: Files, tmp_path: Path
) -> None:
    one, other = (adapter(tmp_path / each, ord(each)) for each in "ab")
    for worker_job in range(32):
        engine.request(
            named(one) if worker_job % 2 else named(other, number=2),
            name := f"request-{worker_job}",
        )
        engine.adapters.stores(name, worker_job)
    files.looks.clear()
    files.gate.clear()
    files.reached.clear()
    engine.adapters.arrived("later", named(one))
    assert files.reached.wait(60.0)  # the others are asked for while this one is under way
    held = [worker_job for worker_job in range(64) if engine.adapters.holds(worker_job, Report(1))]
    assert held == list(range(32))
    assert engine.adapters.take_stored() == []
    files.gate.set()
    stored = list[tuple[int, Report, bool]]()
    while len(stored) < 32:
        stored += engine.adapters.take_stored()
    assert all(vouched for _, _, vouched in stored)
    assert sorted(files.looks) == [one, one, other]
    assert engine.vouches(*range(64))
    assert len(files.looks) == 3, "none has a worker job any more"


def test_nobody_knows_which_of_two_adapters_of_one_number_is_meant(tmp_path: Path) -> None:
    one, other, third = (adapter(tmp_path / each, ord(each)) for each in "abc")
    engine = Engine()
    assert engine.request(named(one), "request")
    engine.adapters.stores("request", 1)
    engine.adapters.read(named(other, in_place=True))
    assert not engine.vouches(1), "it goes on with the other"
    assert engine.request(named(other), "later")
    assert engine.request(named(third), "confused") is None, "it gets the other"
    assert engine.request(named(third, number=2), "fourth") is None
    engine.adapters.close()

    engine = Engine()
    assert engine.request(named(one), "first")
    engine.adapters.removed(1)
    assert engine.request(named(other), "too early") is None
    engine.adapters.close()

    engine = Engine()
    assert engine.request(named(one), "first")
    engine.adapters.ended("first")
    engine.adapters.removed(1)
    assert engine.request(named(other), "second")
    engine.adapters.close()


def test_that_nothing_is_kept_for_an_adapter_is_said_once(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests with the first may come yet when the other has its number."""
    folders = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)]
    for turn in range(6):
        assert engine.request(named(folders[turn % 2]), str(turn)) is None or not turn
    said = [record.getMessage() for record in caplog.records]
    assert [sum(f"the adapter in {folder}" in each for each in said) for folder in folders] == [
        1,
        1,
    ]


def test_an_adapter_that_is_not_to_be_seen_is_another_when_it_is_read_again(
    engine: Engine, tmp_path: Path
) -> None:
    found = [engine.request(named(tmp_path)), engine.request(named(tmp_path, number=2))]
    engine.adapters.read(named(tmp_path, number=2))
    found += [engine.request(named(tmp_path, number=2)), fresh(tmp_path)]
    assert len(set(found) - {None}) == 4
    assert engine.request(named(tmp_path, number=2)) == found[2]
    in_place = named(tmp_path, number=2, in_place=True)
    assert engine.request(in_place) is None, "in each step anew"


def test_nobody_knows_an_adapter_that_cannot_be_read(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").symlink_to(folder / "nowhere")
    assert engine.salt(folder) is None
    (folder / "adapter_model.safetensors").unlink()
    adapter(folder, 1)
    assert engine.salt(folder) is None, "who knows what the engine has loaded"


def test_an_adapter_that_is_not_to_be_seen_is_for_one_process(
    engine: Engine, tmp_path: Path
) -> None:
    assert engine.salt(tmp_path) == engine.salt(tmp_path) != fresh(tmp_path)
    adapter(tmp_path, 1)
    assert engine.salt(tmp_path) is None


def test_the_engine_waits_for_no_look(engine: Engine, files: Files, tmp_path: Path) -> None:
    """Requests and stores do, in its queue and in host memory, until one has begun and ended after
    they came."""
    folder = adapter(tmp_path / "a", 1)
    assert engine.request(named(folder), "early")
    engine.adapters.stores("early", 1)
    files.gate.clear()
    engine.adapters.arrived("request", named(folder))
    assert engine.adapters.holds(1, Report(1))
    for _ in range(3):
        assert engine.adapters.awaits("request")
        assert engine.adapters.take_stored() == []
    change(folder)
    files.gate.set()
    while engine.adapters.awaits("request") or not (stored := engine.adapters.take_stored()):
        pass
    assert engine.adapters.take_salt("request") is None
    assert stored == [(1, Report(1), False)]


def test_files_that_hang_hold_up_nobody(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept meanwhile, and none of those that come is a reason to wait again."""
    monkeypatch.setattr(lora_adapters, "_ROUNDED_S", 0.0)
    folder, other, engine = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2), Engine()
    assert engine.request(named(other, number=2), "stores")
    engine.adapters.stores("stores", 1)
    files.gate.clear()
    files.reached.clear()
    engine.adapters.arrived("first", named(folder))
    assert files.reached.wait(60.0)
    engine.adapters._look_wait_s = 0.0
    for name in ("first", "second", "third"):
        if name != "first":
            engine.adapters.arrived(name, named(folder))
        assert not engine.adapters.awaits(name)
        assert engine.adapters.take_salt(name) is None
    assert engine.adapters.holds(1, Report(1))
    assert [vouched for _, _, vouched in engine.adapters.take_stored()] == [False]
    engine.adapters._look_wait_s = 60.0
    files.gate.set()
    assert engine.salt(folder) == fresh(folder)
    engine.adapters.close()


def test_whatever_a_look_raises_nobody_waits_for_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(lora_adapters, "fingerprint_adapter", lambda _: [][0])
        assert engine.salt(folder) is None
    assert engine.salt(folder) is None, "the engine has read it unseen"


def test_an_adapter_that_changes_while_its_files_hang_is_not_known(
    tmp_path: Path, files: Files
) -> None:
    """The engine may have read it before anybody had looked at it."""
    folder, engine = adapter(tmp_path / "a", 1), Engine(look_wait_s=0.0)
    files.gate.clear()
    engine.adapters.read(named(folder))
    (folder / "adapter_model.safetensors").touch()
    assert engine.request(named(folder)) is None
    files.gate.set()
    engine.adapters._look_wait_s = 60.0
    assert engine.salt(folder) is None
    assert fresh(folder)
    engine.adapters.close()
