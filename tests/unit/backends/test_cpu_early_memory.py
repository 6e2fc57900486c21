"""Memory for slabs, taken while an engine gets ready."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from support.tiers.cpu_regions import CONTEXT, opened, put, served, settings

from kvtier.backends.cpu import BACKEND, CpuTier, memory
from kvtier.record.record import Buffer
from kvtier.system import memory as memory_limits
from kvtier.testing.subject import make_keys


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "in_memory", lambda folder: True)


def open_files(folder: Path) -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(link.readlink())
    return [path for path in found if path.is_relative_to(folder)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much was taken each time."""
    sizes: list[int] = []

    def take(view: Buffer, *rest: object) -> bool:
        sizes.append(len(view))
        return True

    monkeypatch.setattr(memory, "populate", take)
    return sizes


def slab_size(cpu: CpuTier) -> int:
    """Of the one that is in one piece."""
    [place] = cpu._places.by_slab.values()
    return place.slab.header.data_end


def test_the_slab_has_the_memory_that_was_taken_before(tmp_path: Path, taken: list[int]) -> None:
    BACKEND.begin_memory(settings(tmp_path), ())
    BACKEND.begin_memory(settings(tmp_path), ())
    assert list(tmp_path.iterdir()) == [], "it has no name: nothing is left of it if nobody comes"
    with opened(tmp_path, type(CONTEXT)(CONTEXT.namespace, "test", (), True)) as cpu:
        assert len(taken) == 1, "not once more"
        assert slab_size(cpu) < taken[0]
        put(cpu, list(make_keys(3)))
        assert len(served(cpu, list(make_keys(3)))) == 3
    with opened(tmp_path) as cpu:
        assert len(served(cpu, list(make_keys(3)))) == 3
    assert len(open_files(tmp_path)) == 0


def test_a_slab_that_is_kept_has_its_memory(tmp_path: Path, taken: list[int]) -> None:
    with opened(tmp_path):
        pass
    BACKEND.begin_memory(settings(tmp_path), ())
    assert not taken
    assert not memory._begun


def test_what_does_not_fit_is_not_taken(
    tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler says so."""
    monkeypatch.setattr(memory_limits, "memory_left", lambda: 4096)
    BACKEND.begin_memory(settings(tmp_path), ())
    assert not taken
    assert not memory._begun


@pytest.mark.parametrize("lack", ["files", "threads"])
def test_where_the_system_gives_no_more_nothing_is_left_of_what_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """A worker goes on with its other files, and a terabyte has a thousand slabs."""
    open_file = os.open

    def two_at_most(path: Path, flags: int, mode: int = 0o777) -> int:
        if len(open_files(tmp_path)) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return open_file(path, flags, mode)

    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limits:
        if lack == "files":
            limits.setattr(os, "open", two_at_most)
        else:
            limits.setattr(threading.Thread, "start", limited)
        BACKEND.begin_memory(settings(tmp_path, blocks=2000), ())
    assert not memory._begun
    assert open_files(tmp_path) == []


def test_memory_that_is_too_small_or_for_nobody_is_given_back(
    tmp_path: Path, taken: list[int]
) -> None:
    BACKEND.begin_memory(settings(tmp_path, blocks=2), ())
    with opened(tmp_path, blocks=8) as cpu:
        assert slab_size(cpu) > taken[0]
    BACKEND.begin_memory(settings(tmp_path / "..", blocks=2), ())
    memory.drop_ahead(tmp_path / "..")
    assert len(open_files(tmp_path)) == 0
