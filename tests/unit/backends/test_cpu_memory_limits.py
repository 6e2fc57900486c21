"""A tier for which there is no memory is refused: the kernel would kill its maker instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.cpu import BACKEND, CpuSettings, memory
from kvtier.errors import MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import Buffer
from kvtier.settings import ByteSize, Capacity
from kvtier.system import memory as memory_limits
from kvtier.system.memory import populate
from kvtier.testing.subject import NAMESPACE

MIB = 1 << 20
MEMINFO = """MemTotal: {} kB
MemFree: 1 kB
MemAvailable: 1 kB
SwapFree:  {} kB
AnonPages:    1024 kB
Shmem: 2048 kB
HugePages_Total:       0
"""


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def machine(root: Path, groups: str, *, free: int = 900, swap: int = 0) -> Path:
    write(root, "proc/meminfo", MEMINFO.format(free + 3 << 10, swap << 10))
    write(root, "proc/self/cgroup", groups)
    return root


def new_group(root: Path, path: str, limit: str, used: int, files: int) -> None:
    at = f"sys/fs/cgroup/{path}"
    write(root, f"{at}memory.max", limit + "\n")
    write(root, f"{at}memory.current", f"{used * MIB}\n")
    stat = f"anon 7\nfile {9 * files * MIB}\ninactive_file {files * MIB}\nactive_file 0\n"
    write(root, f"{at}memory.stat", stat)


def old_group(root: Path, path: str, limit: int, used: int, files: int) -> None:
    at = f"sys/fs/cgroup/memory/{path}"
    write(root, f"{at}memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{at}memory.usage_in_bytes", f"{used * MIB}\n")
    stat = f"inactive_file 1\ntotal_inactive_file 0\ntotal_active_file {files * MIB}\n"
    write(root, f"{at}memory.stat", stat)


def test_of_a_machine_what_nobody_holds_and_the_swap(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n", free=900, swap=50)
    assert memory_limits.memory_left(tmp_path) == 950 * MIB


def test_of_a_container_what_its_limit_leaves(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    new_group(tmp_path, "", str(500 * MIB), used=300, files=100)
    assert memory_limits.memory_left(tmp_path) == 300 * MIB


def test_a_group_above_may_have_the_lower_limit(tmp_path: Path) -> None:
    machine(tmp_path, "0::/system.slice/engine.service\n")
    new_group(tmp_path, "system.slice/engine.service/", "max", used=1, files=0)
    new_group(tmp_path, "system.slice/", str(200 * MIB), used=150, files=0)
    assert memory_limits.memory_left(tmp_path) == 50 * MIB


@pytest.mark.parametrize("inside", ["docker/abc/", ""])
def test_control_groups_of_the_first_version(tmp_path: Path, inside: str) -> None:
    """In a container its own group is the mount, whatever its path is outside."""
    machine(tmp_path, "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n")
    if inside:
        old_group(tmp_path, "", 0x7FFFFFFFFFFFF000, used=1, files=0)
    old_group(tmp_path, inside, 400 * MIB, used=300, files=20)
    assert memory_limits.memory_left(tmp_path) == 120 * MIB


@pytest.mark.parametrize(
    ("limit", "used", "left"), [("0", 0, 200), (f"{50 * MIB}", 20, 230), ("max", 0, 1000)]
)
def test_of_the_swap_no_more_than_a_container_may_use(
    tmp_path: Path, limit: str, used: int, left: int
) -> None:
    machine(tmp_path, "0::/\n", swap=800)
    new_group(tmp_path, "", str(500 * MIB), used=300, files=0)
    write(tmp_path, "sys/fs/cgroup/memory.swap.max", limit + "\n")
    write(tmp_path, "sys/fs/cgroup/memory.swap.current", f"{used * MIB}\n")
    assert memory_limits.memory_left(tmp_path) == left * MIB


def test_of_the_swap_no_more_than_a_container_of_the_first_version_may_use(tmp_path: Path) -> None:
    """Its limit is of memory and swap together."""
    machine(tmp_path, "4:memory:/\n", swap=800)
    old_group(tmp_path, "", 400 * MIB, used=300, files=20)
    write(tmp_path, "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", f"{500 * MIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", f"{310 * MIB}\n")
    assert memory_limits.memory_left(tmp_path) == 210 * MIB


def test_what_a_process_may_have_at_all(tmp_path: Path) -> None:
    machine(tmp_path, "0::/system.slice/engine.service\n")
    whole = memory_limits.memory_given(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    new_group(tmp_path, "system.slice/engine.service/", "max", used=1, files=0)
    assert memory_limits.memory_given(tmp_path) == whole
    new_group(tmp_path, "system.slice/", str(200 * MIB), used=150, files=0)
    assert memory_limits.memory_given(tmp_path) == 200 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    new_group(tmp_path, "", str(100 * MIB), used=101, files=0)
    assert memory_limits.memory_left(tmp_path) == 0


@pytest.mark.parametrize("meminfo", ["", "MemTotal:\n", "MemTotal: many kB\n", None])
def test_a_system_that_does_not_say(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path, "proc/meminfo", meminfo)
    assert memory_limits.memory_left(tmp_path) is None


def mount(root: Path, folder: Path, kind: str, options: str) -> None:
    """Let the system say that the folder's file system is of this kind."""
    write(
        root,
        "proc/self/mounts",
        f"a / proc huge=always 0 0\nnone {folder} {kind} rw,{options} 0 0\n",
    )


@pytest.mark.parametrize(
    ("switch", "kind", "options", "reason"),
    [
        ("always within_size advise [never] deny force", "tmpfs", "size=1k", "remount,huge=advise"),
        ("always [advise] never deny force", "tmpfs", "huge=never", "remount,huge=advise"),
        ("always advise [never] deny force", "tmpfs", "huge=advise", None),
        ("always advise [never] deny force", "tmpfs", "huge=within_size", None),
        ("always advise never [deny] force", "tmpfs", "huge=always", "shmem_enabled is deny"),
        ("always advise never deny [force]", "tmpfs", "size=1k", None),
        ("always [advise] never deny force", "ext4", "relatime", "not on a tmpfs"),
        (None, "tmpfs", "huge=always", "this kernel"),
    ],
)
def test_why_there_are_no_huge_pages(
    tmp_path: Path, switch: str | None, kind: str, options: str, reason: str | None
) -> None:
    """For a tmpfs its own option counts, whatever holds for other shared memory."""
    mount(tmp_path, tmp_path, kind, options)
    if switch is not None:
        write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", switch)
    found = memory.no_huge_pages(tmp_path, tmp_path)
    assert found is None if reason is None else reason in str(found)


def test_huge_pages_are_asked_for_before_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there already stays as it is."""
    there: list[int] = []

    def take(view: Buffer, *rest: Any) -> bool:
        making = sorted(tmp_path.rglob("*.data.making"))
        there.extend(each.stat().st_blocks for each in making)
        return populate(view, *rest)

    monkeypatch.setattr(memory, "populate", take)
    settings = CpuSettings(
        path=str(tmp_path), capacity=Capacity(size=ByteSize(MIB)), huge_pages=True
    )
    for _ in range(2):  # the second time the slabs are taken over
        BACKEND.open_tier(settings, TierContext(NAMESPACE, "test")).close()
    assert there == [0]


def test_what_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CpuSettings(path=str(tmp_path), capacity=Capacity(size=ByteSize(MIB)))
    monkeypatch.setattr(memory_limits, "in_memory", lambda folder: True)
    monkeypatch.setattr(memory_limits, "memory_left", lambda: MIB // 2)
    with pytest.raises(MediumError, match="do not fit into memory, of which 524288 bytes"):
        BACKEND.open_tier(settings, TierContext(NAMESPACE, "test"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(
        memory_limits, "in_memory", lambda folder: False
    )  # a disk: memory is given back
    BACKEND.open_tier(settings, TierContext(NAMESPACE, "test")).close()
