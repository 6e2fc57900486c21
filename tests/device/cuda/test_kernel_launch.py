"""Kernels that were built are launched by the driver alone, with the arguments that Triton would
have given; what is not as expected is left to Triton."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.device.cuda import runtime
from kvtier.device.cuda.runtime import QuickLaunch

SIGNATURE = {"there": "i64", "here": "*i64", "count": "i32", "threads": "constexpr"}


class Kernel:
    """What Triton makes of a function: notes its own launches, and says what was built."""

    def __init__(self, **changes: Any) -> None:
        self.launched: list[Any] = []
        target = SimpleNamespace(warp_size=32)
        facts = {"num_ctas": 1, "num_warps": 4, "shared": 512}
        facts |= {"global_scratch_size": 0, "profile_scratch_size": 0}
        self._built = SimpleNamespace(
            function=1 << 40,
            metadata=SimpleNamespace(target=target, **{**facts, **changes}),
            src=SimpleNamespace(signature=changes.get("signature", SIGNATURE)),
        )

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.launched.append((grid, arguments, constants))
            return self._built

        return run


class Tensor:
    def data_ptr(self) -> int:
        return 1 << 45


class Driver:
    """Stands for libcuda: reads what it is given as the device would."""

    def __init__(self) -> None:
        self.result = 0
        self.launched: list[Any] = []

    def launch(self, *given: Any) -> int:
        *numbers, places, extra = given
        assert extra is None
        kinds = (ctypes.c_int64, ctypes.c_uint64, ctypes.c_int32)
        at = [ctypes.cast(place, ctypes.POINTER(kind)) for place, kind in zip(places, kinds)]  # noqa: B905
        scratch = [ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64))[0] for place in places[3:]]
        assert len(scratch) >= 2, "Triton's kernels have two more"
        assert not any(scratch)
        self.launched.append((numbers, [value[0] for value in at]))
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(runtime, "_launcher", lambda: driver.launch)
    monkeypatch.setattr(runtime, "_builds", {})
    return driver


class Torch:
    """Knows which stream is the current one."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.cuda = SimpleNamespace(stream=self._within)

    @contextlib.contextmanager
    def _within(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        yield


def stream(handle: int, device: int = 0) -> Any:
    return SimpleNamespace(cuda_stream=handle, device_index=device)


def test_the_first_launch_is_tritons_and_the_others_the_drivers(driver: Driver) -> None:
    kernel, torch, here = Kernel(), Torch(), stream(77)
    quick = QuickLaunch(torch, here)
    quick(kernel, 3, 1 << 41, Tensor(), 5, threads=1024, num_warps=4)
    assert len(kernel.launched) == 1
    assert torch.streams == [here]
    assert driver.launched == []
    quick(kernel, 7, 1 << 42, Tensor(), 6, threads=1024, num_warps=4)
    QuickLaunch(torch, stream(78))(kernel, 1, 1 << 42, Tensor(), -1, threads=1024, num_warps=4)
    assert len(kernel.launched) == 1
    assert driver.launched == [
        ([1 << 40, 7, 1, 1, 128, 1, 1, 512, 77], [1 << 42, 1 << 45, 6]),
        ([1 << 40, 1, 1, 1, 128, 1, 1, 512, 78], [1 << 42, 1 << 45, -1]),
    ]


def test_what_triton_would_build_anew_is_another_build(driver: Driver) -> None:
    """Other constants, wider numbers, another device, another kernel."""
    kernel, torch = Kernel(), Torch()
    quick = QuickLaunch(torch, stream(77))
    for there in (1 << 31, (1 << 31) - 1):  # the first of 64 bits, and the last of 32
        quick(kernel, 1, there, Tensor(), 5, threads=1024, num_warps=4)
    quick(kernel, 1, 1 << 41, Tensor(), 5, threads=512, num_warps=4)
    QuickLaunch(torch, stream(77, 1))(kernel, 1, 1 << 41, Tensor(), 5, threads=1024, num_warps=4)
    quick(Kernel(), 1, 1 << 41, Tensor(), 5, threads=1024, num_warps=4)
    assert len(kernel.launched) == 4
    assert driver.launched == []


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 4},  # a debugging mode of Triton's
        {"instrumentation_mode": "gsan"},  # another, with arguments of its own
        {"signature": {**SIGNATURE, "count": "fp32"}},
        {"signature": None},
    ],
)
def test_what_is_not_as_expected_is_left_to_triton(driver: Driver, changes: dict[str, Any]) -> None:
    kernel = Kernel(**changes)
    quick = QuickLaunch(Torch(), stream(77))
    for _ in range(3):
        quick(kernel, 1, 1 << 41, Tensor(), 5, threads=1024)
    assert len(kernel.launched) == 3
    assert driver.launched == []


def test_without_a_driver_triton_launches(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(runtime, "_launcher", lambda: None)
    kernel = Kernel()
    quick = QuickLaunch(Torch(), stream(77))
    for _ in range(2):
        quick(kernel, 1, 1 << 41, Tensor(), 5, threads=1024)
    assert len(kernel.launched) == 2


def test_a_launch_that_is_refused_is_an_error(driver: Driver) -> None:
    kernel, quick = Kernel(), QuickLaunch(Torch(), stream(77))
    quick(kernel, 1, 1 << 41, Tensor(), 5, threads=1024)
    driver.result = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel: error 700"):
        quick(kernel, 1, 1 << 41, Tensor(), 5, threads=1024)
