"""Whether GPUDirect Storage is used: every reason against it, and what each setting makes of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device.fake_cufile import CompatMode, FakeCufile

from kvtier.device import direct as gds_probe
from kvtier.device.direct import DirectAccess, probe
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.errors import MediumError
from kvtier.settings import Gds


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("""print('noise'); print('{"reason": null}')""", None),
        ("""print('{"reason": "there is no CUDA device"}')""", "there is no CUDA device"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "status -11 (without a word)"),
        ("raise SystemExit('libcufile.so is broken')", "status 1 (libcufile.so is broken)"),
        ("print('hello')", "died with status 0"),
        ("print('[]')", "died with status 0"),
    ],
)
def test_the_attempt_is_believed_only_if_it_says_so(
    tmp_path: Path, code: str, reason: str | None
) -> None:
    found = probe(tmp_path, command=python(code))
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_an_attempt_that_hangs_is_killed_and_its_file_removed(tmp_path: Path) -> None:
    code = "import sys, time; open(sys.argv[1], 'w'); print(sys.argv[2:]); time.sleep(600)"
    reason = probe(tmp_path, seconds=0.5, command=python(code), device=3)
    assert reason is not None
    assert "did not end within" in reason
    assert list(tmp_path.iterdir()) == []


_HELD = """
import ctypes, os, sys, time
from pathlib import Path

libc, held = ctypes.CDLL(None), os.getpid()
libc.prctl(0x59616D61, ctypes.c_long(-1), 0, 0, 0)  # whoever may hold it
if not os.fork():
    seized = not libc.ptrace(0x4206, held, 0, 0)
    end = Path(sys.argv[1]).parent / "end"
    (end.parent / ("held" if seized else "free")).touch()
    end.read_bytes()
    os._exit(0)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it still runs
def test_an_attempt_that_cannot_be_killed_is_not_waited_for(tmp_path: Path) -> None:
    """As one that a driver holds in the kernel; here another process does, as debuggers do."""
    os.mkfifo(tmp_path / "end")
    said: list[str | None] = []

    def ask() -> None:
        said.append(probe(tmp_path, seconds=5, command=python(_HELD)))

    engine = threading.Thread(target=ask, daemon=True)
    engine.start()
    engine.join(60)
    waits = engine.is_alive()
    (tmp_path / "end").write_bytes(b"")  # which lets it go
    engine.join(60)
    if (tmp_path / "free").exists():
        pytest.skip("processes may not hold others here")
    assert (tmp_path / "held").exists()
    assert not waits
    assert "did not end within" in str(said)


def test_an_attempt_that_cannot_start_is_a_reason(tmp_path: Path) -> None:
    reason = probe(tmp_path, command=[str(tmp_path / "no-python")])
    assert reason is not None
    assert "No such file" in reason


LAYOUT = DeviceLayout((DeviceTensor(0, 4, 4096, 4096),), ((PageRef(0, 4096),),))


class Machine:
    """Says what an attempt would, and makes drivers, if it has any."""

    def __init__(self, reason: str | None = None, driver: Exception | None = None) -> None:
        self.attempts = 0
        self._reason = reason
        self._driver = driver

    def attempt(self, folder: Path) -> str | None:
        self.attempts += 1
        return self._reason

    def driver(self) -> FakeCufile:
        if self._driver is not None:
            raise self._driver
        return FakeCufile()

    def access(self, mode: Gds, *folders: Path) -> DirectAccess:
        return DirectAccess(mode, folders, self.attempt, self.driver)


def test_off_means_off(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.access(Gds.OFF, tmp_path).open(LAYOUT, bytes(16)) is None
    assert machine.access(Gds.AUTO).open(LAYOUT, bytes(16)) is None, "no tier has files"
    assert machine.attempts == 0


@pytest.mark.parametrize("mode", [Gds.AUTO, Gds.REQUIRE])
def test_what_works_is_tried_once(tmp_path: Path, mode: Gds) -> None:
    machine = Machine()
    access = machine.access(mode, tmp_path, tmp_path)
    for _ in range(2):
        loader = access.open(LAYOUT, bytes(16))
        assert loader is not None
        loader.close()
    assert machine.attempts == 2, "each folder"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine("there is no CUDA device"), "there is no CUDA device"),
        (Machine(driver=RuntimeError("out of memory")), r"the driver failed \(out of memory\)"),
        (Machine(driver=ImportError("no kvikio")), r"the driver failed \(no kvikio\)"),
    ],
)
def test_a_reason_against_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, machine: Machine, reason: str
) -> None:
    caplog.set_level("INFO")
    access = machine.access(Gds.AUTO, tmp_path)
    assert access.open(LAYOUT, bytes(16)) is None
    assert access.open(LAYOUT, bytes(16)) is None
    assert len(re.findall(f"through pinned memory, not GPUDirect.*: {reason}", caplog.text)) == 1
    with pytest.raises(MediumError, match=f"{reason}: mend that, or set gds: auto"):
        machine.access(Gds.REQUIRE, tmp_path).open(LAYOUT, bytes(16))


class Driver:
    """Stands for libcuda."""

    def __init__(self, started: int, devices: int) -> None:
        self._started = started
        self._devices = devices

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._started

    def cuDeviceGetCount(self, into: Any) -> int:  # noqa: N802
        ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = self._devices
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError("cannot open shared object file")
        return driver

    monkeypatch.setattr(gds_probe.ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "no NVIDIA driver"),
        (Driver(100, 0), "no CUDA device"),
        (Driver(0, 0), "no CUDA device"),
    ],
)
def test_nothing_of_cufile_is_touched_without_a_device(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, reason: str
) -> None:
    with_driver(monkeypatch, driver)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    found = gds_probe.reason_against("/nowhere")
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_library_that_cannot_be_loaded_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    """The last is what kvikio 26.10 raises where there is no libcufile.so."""
    with_driver(monkeypatch, Driver(0, 1))
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kvikio.py").write_text(f"raise {error}('libkvikio.so: no such file')")
    assert "cannot be loaded (libkvikio.so" in str(gds_probe.reason_against("/nowhere"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver(0, 1))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "kvtier[gds]" in str(gds_probe.reason_against("/nowhere"))


@pytest.mark.parametrize(
    ("available", "mode", "reason"),
    [(False, CompatMode.AUTO, "nvidia-fs"), (True, CompatMode.ON, "KVIKIO_COMPAT_MODE")],
)
def test_a_library_that_would_go_through_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, available: bool, mode: CompatMode, reason: str
) -> None:
    with_library(monkeypatch, available, mode, ModuleType("torch"))
    assert reason in str(gds_probe.reason_against("/nowhere"))


def with_library(
    monkeypatch: pytest.MonkeyPatch, available: bool, mode: CompatMode, torch: ModuleType
) -> None:
    """A driver with a device, and kvikio as it says that it is."""
    with_driver(monkeypatch, Driver(0, 1))
    kvikio, driver = (ModuleType(name) for name in ("kvikio", "driver"))
    kvikio.cufile_driver = driver  # type: ignore[attr-defined]
    kvikio.defaults = driver  # type: ignore[attr-defined]
    driver.get = {"is_gds_available": available, "compat_mode": mode}.get  # type: ignore[attr-defined]
    driver.set = lambda values: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", driver)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_a_device_that_the_engine_has_for_itself_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In exclusive mode, or without memory for a second context."""

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )

    torch = ModuleType("torch")
    torch.randint, torch.uint8 = refused, np.uint8  # type: ignore[attr-defined]
    with_library(monkeypatch, True, CompatMode.AUTO, torch)
    assert gds_probe.reason_against("/nowhere") == (
        "a process of its own cannot use the device "
        "(CUDA error: CUDA-capable device(s) is/are busy or unavailable)"
    )


class Detour(Driver):
    """cuFile on a file system that it cannot read directly: it goes through the host, if it may."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.compat_mode = True

    def cuFileSetParameterBool(self, parameter: int, value: ctypes.c_bool) -> int:  # noqa: N802
        assert parameter == 1
        self.compat_mode = value.value
        return 0

    def CuFile(self, path: str, flags: str) -> Any:  # noqa: N802
        if not self.compat_mode:
            raise RuntimeError("file system not supported")
        moved = SimpleNamespace(get=lambda: gds_probe.SIZE)
        file = SimpleNamespace(pwrite=lambda *_: moved, pread=lambda *_: moved)
        return contextlib.nullcontext(file)


def test_a_file_system_that_would_be_read_through_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch, cufile = ModuleType("torch"), Detour()
    torch.uint8, torch.cuda = np.uint8, SimpleNamespace(synchronize=lambda device: None)  # type: ignore[attr-defined]
    torch.randint = lambda *_, **__: np.zeros(1)  # type: ignore[attr-defined]
    torch.zeros_like = np.zeros_like  # type: ignore[attr-defined]
    with_library(monkeypatch, True, CompatMode.AUTO, torch)
    with_driver(monkeypatch, cufile)
    sys.modules["kvikio"].CuFile = cufile.CuFile  # type: ignore[attr-defined]
    reason = gds_probe.reason_against(str(tmp_path / "file"))
    assert f"the file system of {tmp_path} refuses it" in str(reason)


def test_a_driver_that_does_not_open_without_the_module_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(name: str) -> None:
        raise RuntimeError("cuFile error: nvidia-fs driver is not loaded")

    with_library(monkeypatch, True, CompatMode.AUTO, ModuleType("torch"))
    sys.modules["kvikio.cufile_driver"].get = closed  # type: ignore[attr-defined]
    assert "nvidia-fs" in str(gds_probe.reason_against("/nowhere"))


def test_the_real_attempt_has_an_answer_here(tmp_path: Path) -> None:
    """Whatever this machine is: an answer, within the time."""
    reason = probe(tmp_path)
    assert reason is None or reason
    assert list(tmp_path.iterdir()) == []
