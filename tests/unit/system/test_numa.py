"""What is near which GPU: read from a tree like the kernel's."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.backends.cpu.memory import NewMemory
from kvtier.system import memory
from kvtier.system.memory import Topology


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine(root: Path, nodes: str, gpus: list[tuple[str, str]]) -> Topology:
    write(root / "devices/system/node/online", nodes)
    write(root / "devices/system/node/node0/cpulist", "0-3,8")
    write(root / "devices/system/node/node1/cpulist", "4-7")
    devices = root / "bus/pci/devices"
    for address, node in gpus:
        write(devices / address / "vendor", "0x10de")
        write(devices / address / "class", "0x030200")
        write(devices / address / "numa_node", node)
    write(devices / "0000:00:01.0/vendor", "0x8086")
    write(devices / "0000:00:01.0/class", "0x030000")
    write(devices / "0000:01:00.1/vendor", "0x10de")
    write(devices / "0000:01:00.1/class", "0x040300")
    return Topology(root, root / "driver", root / "dev")


FOUR = [("0000:1b:00.0", "0"), ("0000:3d:00.0", "0"), ("0000:9c:00.0", "1"), ("0000:d1:00.0", "1")]


def test_two_nodes(tmp_path: Path) -> None:
    found = machine(tmp_path, "0-1", FOUR)
    assert found.nodes == [0, 1]
    assert found.gpus() == [0, 0, 1, 1]
    assert found.cores(0) == {0, 1, 2, 3, 8}
    assert found.cores(found.node_of("0000:9C:00.0")) == {4, 5, 6, 7}
    assert found.cores(None) == set()


@pytest.mark.parametrize(
    ("first", "count", "visible", "nodes"),
    [
        (0, 1, None, (0,)),
        (0, 2, None, (0,)),
        (2, 2, None, (1,)),
        (0, 4, None, (0, 1)),
        (4, 2, None, (0,)),
        (0, 1, "3", (1,)),
        (0, 2, "1,2", (0, 1)),
        (0, 2, "GPU-8e2c", (0,)),
        (0, 1, "7", (0,)),
    ],
)
def test_the_nodes_of_an_engines_gpus(
    tmp_path: Path, first: int, count: int, visible: str | None, nodes: tuple[int, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine(tmp_path, "0-1", FOUR).near(first, count, environment) == nodes


def driver_says(root: Path, *minors: int) -> None:
    """What NVIDIA's driver tells of some of the four GPUs."""
    for minor in minors:
        address, _ = FOUR[minor]
        said = f"Model: \t\t NVIDIA\nGPU UUID: \t GPU-{minor}abc-1\nDevice Minor: \t {minor}\n"
        write(root / "driver/gpus" / address / "information", said)


@pytest.mark.parametrize(
    ("told", "given", "visible", "nodes"),
    [
        ([2], [2], None, (1,)),  # what the driver says there is replaced by NVIDIA's container hook
        ([0, 1, 2, 3], [2], None, (1,)),  # or not
        ([0, 1, 2, 3], [1, 3], "1", (1,)),
        ([0, 1, 2, 3], [], "2", (1,)),  # device files are made when somebody uses the driver
        ([0, 1, 2, 3], [0, 1, 2, 3], "GPU-3abc-1,GPU-0a", (1,)),
        ([0, 1, 2, 3], [0, 1, 2, 3], "GPU-3abc-1, GPU-9", (0,)),
    ],
)
def test_a_container_has_only_the_gpus_that_were_given_to_it(
    tmp_path: Path, told: list[int], given: list[int], visible: str | None, nodes: tuple[int, ...]
) -> None:
    found = machine(tmp_path, "0-1", FOUR)
    driver_says(tmp_path, *told)
    for minor in given:
        write(tmp_path / f"dev/nvidia{minor}", "")
    assert found.gpus() == [[0, 0, 1, 1][minor] for minor in given or range(4)]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert found.near(0, 1, environment) == nodes


@pytest.mark.parametrize(
    ("nodes", "gpus"),
    [("0", FOUR), ("0-1", []), ("0-1", [("0000:1b:00.0", "-1")]), ("", FOUR)],
)
def test_nothing_to_choose(tmp_path: Path, nodes: str, gpus: list[tuple[str, str]]) -> None:
    found = machine(tmp_path, nodes, gpus)
    assert found.near(0, 1, {}) == ()
    assert len(found.nodes) == 2 or found.cores(0) == set()


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    found = Topology(tmp_path / "nothing")
    assert (found.nodes, found.gpus(), found.near(0, 8, {})) == ([], [], ())


# As Docker's own profile does to who has not CAP_SYS_NICE: `mbind` fails, all else goes on.
FILTERED = """
import ctypes, struct
from kvtier.system import memory
number = memory._MBIND[memory.platform.machine()]
if_it_is, refused, allowed = 0x15, 0x00050000 | 1, 0x7FFF0000
steps = [(0x20, 0, 0, 0), (if_it_is, 0, 1, number), (6, 0, 0, refused), (6, 0, 0, allowed)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, program, 0, 0)
print(memory.place(memoryview(bytearray(4096)), [0]))
"""


def test_a_container_that_may_not_place_memory_is_told_what_it_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", FILTERED], capture_output=True, text=True)
    assert done.stdout == "Operation not permitted (in Docker: --cap-add SYS_NICE)\n", done.stderr


def test_memory_is_placed_or_there_is_a_reason() -> None:
    with mmap.mmap(-1, 1 << 16) as mapped:
        view = memoryview(mapped)
        reason = memory.place(view, Topology().nodes[:1] or [0])
        assert reason is None or reason
        assert memory.place(view, [777]) is not None, "there is no such node"
        view.release()


def test_a_thread_stays_on_its_cores_and_others_do_not_mind() -> None:
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    seen: list[set[int]] = []

    def run() -> None:
        memory.bind_thread({*one, 4000})
        seen.append(os.sched_getaffinity(0))
        memory.bind_thread({4001})
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [one, one]
    assert os.sched_getaffinity(0) == mine


def test_memory_near_gpus_is_memory_like_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with (tmp_path / "slab").open("w+b") as file:
        NewMemory(tmp_path, [0], huge_pages=False, serving=False).shape(file.fileno(), 1 << 20)
        file.seek(1 << 19)
        file.write(b"bytes")
    assert caplog.text.count("NUMA node 0, beside the GPUs") == 1
