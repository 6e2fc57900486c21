"""The faulty disk does what its model says, no more and no less."""

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.record.record import ALIGN
from kvtier.testing.faults import SECTOR, Call, Fault, FaultyDisk, scripted, seeded

OLD, NEW = b"o" * 4 * ALIGN, b"n" * 4 * ALIGN


class Bench:
    """One file full of old bytes, on a disk that fails at the next call."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "file"
        self.path.write_bytes(OLD)
        self.disk = FaultyDisk(seed=3)
        self.fd = self.disk.open(self.path)

    def fail(self, fault: Fault) -> None:
        self.disk.plan = scripted({self.disk.calls: fault})

    def write(self) -> int:
        return self.disk.writev(self.fd, [memoryview(NEW)[:ALIGN], memoryview(NEW)[ALIGN:]], 0)

    def read(self) -> bytes:
        whole = bytearray(len(OLD))
        count = self.disk.readv(self.fd, [memoryview(whole)], 0)
        return bytes(whole[:count])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.disk.close(bench.fd)


def bits_apart(one: bytes, two: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, two, strict=True))


def test_a_healthy_disk_is_a_disk(bench: Bench) -> None:
    assert bench.write() == len(NEW)
    assert bench.read() == NEW
    assert bench.disk.calls == 3
    assert bench.disk.happened == []


def test_a_short_read_returns_a_right_part(bench: Bench) -> None:
    bench.fail(Fault.SHORT_READ)
    part = bench.read()
    assert 0 < len(part) < len(OLD)
    assert OLD.startswith(part)
    assert bench.read() == OLD


def test_a_short_write_says_how_short(bench: Bench) -> None:
    bench.fail(Fault.SHORT_WRITE)
    count = bench.write()
    assert 0 < count < len(NEW)
    assert bench.path.read_bytes() == NEW[:count] + OLD[count:]


def test_a_torn_write_claims_all_and_leaves_whole_sectors(bench: Bench) -> None:
    bench.fail(Fault.TORN_WRITE)
    assert bench.write() == len(NEW)
    there = bench.path.read_bytes()
    cut = there.count(b"n")
    assert there == NEW[:cut] + OLD[cut:]
    assert cut < len(NEW)
    assert cut % SECTOR == 0


def test_one_bit_flips_on_the_way_in_or_out(bench: Bench) -> None:
    bench.fail(Fault.FLIPPED_BIT)
    assert bits_apart(bench.read(), OLD) == 1
    assert bench.read() == OLD
    bench.fail(Fault.FLIPPED_BIT)
    assert bench.write() == len(NEW)
    assert bits_apart(bench.path.read_bytes(), NEW) == 1


def test_eio_does_nothing(bench: Bench) -> None:
    bench.fail(Fault.EIO)
    with pytest.raises(OSError) as caught:
        bench.write()
    assert caught.value.errno == errno.EIO
    assert bench.path.read_bytes() == OLD


def test_a_full_disk_may_have_taken_a_part(bench: Bench) -> None:
    bench.fail(Fault.ENOSPC)
    with pytest.raises(OSError) as caught:
        bench.write()
    assert caught.value.errno == errno.ENOSPC
    cut = bench.path.read_bytes().count(b"n")
    assert bench.path.read_bytes() == NEW[:cut] + OLD[cut:]
    bench.fail(Fault.ENOSPC)
    with pytest.raises(OSError) as caught:
        bench.disk.open(bench.path.with_name("another"), create=True)
    assert caught.value.errno == errno.ENOSPC
    assert not bench.path.with_name("another").exists()


def test_latency_lets_others_go_first(bench: Bench) -> None:
    seen: list[Call] = []
    bench.disk.on_latency = seen.append
    bench.fail(Fault.LATENCY)
    assert bench.read() == OLD
    assert seen == [Call("readv", 1)]


DIE = """
import sys
from pathlib import Path
from kvtier.testing.faults import Fault, FaultyDisk
disk = FaultyDisk(lambda call: Fault.DEATH if call.name == "writev" else None, seed=3)
disk.writev(disk.open(Path(sys.argv[1])), [memoryview(bytes([110]) * 16384)], 0)
"""


def test_death_is_a_kill_in_the_middle_of_a_write(bench: Bench) -> None:
    done = subprocess.run([sys.executable, "-c", DIE, bench.path], check=False)
    assert done.returncode == -signal.SIGKILL
    cut = bench.path.read_bytes().count(b"n")
    assert bench.path.read_bytes() == NEW[:cut] + OLD[cut:]
    assert cut < len(NEW)


def test_an_impossible_fault_does_not_happen(bench: Bench) -> None:
    bench.fail(Fault.SHORT_WRITE)
    assert bench.read() == OLD
    assert bench.disk.happened == []


def test_seeds_repeat() -> None:
    calls = [Call(name, number) for number, name in enumerate(["readv", "writev", "open"] * 50)]
    one, two = (seeded(5, 0.3, list(Fault)) for _ in range(2))
    faults = [one(call) for call in calls]
    assert faults == [two(call) for call in calls]
    assert 20 < sum(fault is not None for fault in faults) < 80
