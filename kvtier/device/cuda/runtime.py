"""The CUDA runtime in this process: events, batched copies, and launches of kernels."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier.device.copier import StreamEvent
from kvtier.device.layout import Ints
from kvtier.system.memory import Topology

logger = logging.getLogger(__name__)


def forget_error(cudart: Any) -> None:
    """An error that was dealt with must not be reported by the next call that has none."""
    cudart.cudaGetLastError()


def leave_captures_alone() -> None:
    """Let this thread work while another one captures a graph, which it would spoil otherwise."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_CAPTURE_RELAXED = 2


def cores_near(index: int, topology: Topology) -> set[int]:
    """The cores of the NUMA node that a device is at; empty if there is nothing to choose."""
    name = ctypes.create_string_buffer(32)
    cudart = runtime()
    if cudart.cudaDeviceGetPCIBusId(name, ctypes.c_int(len(name)), ctypes.c_int(index)):
        forget_error(cudart)
        return set()
    node = topology.node_of(name.value.decode())
    cores = topology.cores(node)
    if cores:
        logger.info("copies of CUDA device %d run on the cores of NUMA node %d", index, node)
    return cores


_RUNTIME = re.compile(r"libcudart(-\w+)?\.so[.\d]*")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The CUDA runtime in this process: torch has loaded one, and there must not be two.

    Looked for once: an engine has thousands of mappings, and each thread of a copier asks. Others
    load stand-ins of a similar name (TileLang's `libcudart_stub.so`).
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.removesuffix(" (deleted)\n") for line in maps if "libcudart" in line]
    mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in lines}
    paths = [path for path in mapped if _RUNTIME.fullmatch(path.rpartition("/")[2])]
    if not paths:
        raise RuntimeError("torch has loaded no CUDA runtime: this is a build without CUDA")
    return ctypes.CDLL(sorted(paths)[0])


def event_on(torch: Any, stream: Any) -> StreamEvent:
    """The point that a stream has come to, for threads that sleep until then."""
    event: StreamEvent = torch.cuda.Event(blocking=True)
    event.record(stream)  # type: ignore[attr-defined]
    return event


def end_of(torch: Any, stream: Any) -> StreamEvent:
    """The point that a stream of the copier's has come to. Where no event can be had, the stream
    itself, which can be waited for as well: what it has been given must not outlive its job."""
    try:
        return event_on(torch, stream)
    except RuntimeError:
        own: StreamEvent = stream
        return own


BatchCopy = Callable[[Ints, Ints, Ints, bool], object]
"""Queue copies (targets, sources, sizes) on torch's current stream; the flag says that no stream of
the device writes to the sources meanwhile. Returns what must live until they are done."""
_PIECES = 4096
"""Pieces in one call. A driver of CUDA 13.0 crashed over 50,000, which small pages could make."""


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER, _ANY_ORDER = 1, 3
_OVERLAP_WITH_COMPUTE = 1
_UNSUPPORTED = (36, 801)
"""The driver is too old for the call, or the platform does not have it."""


def runtime_copy(torch: Any) -> BatchCopy:
    """cudaMemcpyBatchAsync of the runtime that torch has loaded; piece by piece where that, or the
    driver, is older than 12.8."""
    cudart = runtime()
    version, driver = ctypes.c_int(), ctypes.c_int()
    cudart.cudaRuntimeGetVersion(ctypes.byref(version))
    cudart.cudaDriverGetVersion(ctypes.byref(driver))
    one_by_one = _piece_by_piece(torch, cudart)
    if min(version.value, driver.value) < 12080:
        logger.warning("CUDA before 12.8 has no batched copies: every page costs a call")
        return one_by_one
    fails_at = [ctypes.c_size_t()] if version.value < 13000 else []
    first = (ctypes.c_size_t * 1)(0)
    orders = [
        ctypes.byref(_Attributes(source_order=order, flags=_OVERLAP_WITH_COMPUTE))
        for order in (_IN_STREAM_ORDER, _ANY_ORDER)
    ]
    batched = True

    def copy(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        nonlocal batched
        if not batched:
            return one_by_one(targets, sources, sizes, quiet_source)
        columns = [np.ascontiguousarray(each) for each in (targets, sources, sizes)]
        result = cudart.cudaMemcpyBatchAsync(
            *(ctypes.c_void_p(each.__array_interface__["data"][0]) for each in columns),
            ctypes.c_size_t(len(sizes)),
            orders[quiet_source],
            first,
            ctypes.c_size_t(1),
            *(ctypes.byref(each) for each in fails_at),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if not result:
            return columns
        forget_error(cudart)
        if result not in _UNSUPPORTED:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {result}")
        logger.warning("no batched copies here (CUDA error %d): every page costs a call", result)
        batched = False
        return one_by_one(targets, sources, sizes, quiet_source)

    return copy


def _piece_by_piece(torch: Any, cudart: Any) -> BatchCopy:
    def copy(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pieces = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for target, source, size in pieces:
            result = cudart.cudaMemcpyAsync(
                ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), 4, stream
            )
            if result:
                forget_error(cudart)
                raise RuntimeError(f"cudaMemcpyAsync: error {result}")
        return None

    return copy


def few_at_once(copy: BatchCopy) -> BatchCopy:
    """The same copy, in as many calls as it takes."""

    def split(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        if len(sizes) <= _PIECES:
            return copy(targets, sources, sizes, quiet_source)
        cuts = [slice(at, at + _PIECES) for at in range(0, len(sizes), _PIECES)]
        return [copy(targets[cut], sources[cut], sizes[cut], quiet_source) for cut in cuts]

    return split


# -- kernels that Triton has built, launched by the driver alone -----------------------------------


Launch = Callable[..., None]
"""Launch a kernel, with so many programs and these arguments; those with names are constants."""

_KINDS = {"*i64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
_WIDE = 1 << 31
"""Whole numbers from here on have 64 bits."""


def by_triton(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> Any:
    """On torch's current stream; returns what was built for these arguments."""
    return kernel[(programs,)](*arguments, **constants)


class _Build(NamedTuple):
    """A kernel as it was built."""

    function: int
    threads: int
    shared: int
    kinds: Sequence[Any]
    """The type of each argument that is not a constant."""

    def launch(self, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Raises RuntimeError if the driver refuses."""
        values = [
            kind(argument if isinstance(argument, int) else argument.data_ptr())
            for kind, argument in zip(self.kinds, arguments, strict=True)
        ]
        count = len(values)
        # Behind its own, a kernel of Triton's may have others, for memory that these need none of.
        places = (ctypes.c_void_p * (count + _SPARE))(
            *map(ctypes.addressof, values), *[_NOTHING_AT] * _SPARE
        )
        result = _launcher()(
            self.function, programs, 1, 1, self.threads, 1, 1, self.shared, stream, places, None
        )
        if result:
            raise RuntimeError(f"cuLaunchKernel: error {result}")


_SPARE = 4
_NOTHING = ctypes.c_void_p()
_NOTHING_AT = ctypes.addressof(_NOTHING)


class QuickLaunch:
    """Launches on one stream of one device, by the driver alone where that is possible."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch = torch
        self._stream = stream
        self._handle = int(stream.cuda_stream)
        self._device = int(stream.device_index)

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        wide = [isinstance(each, int) and each >= _WIDE for each in arguments]
        name = (kernel, self._device, *constants.values(), *wide)
        if (build := _builds.get(name)) is not None:
            build.launch(programs, self._handle, arguments)
            return
        with self._torch.cuda.stream(self._stream):
            built = by_triton(kernel, programs, *arguments, **constants)
        if name not in _builds:
            _builds[name] = _build_of(built)


_builds: dict[tuple[Any, ...], _Build | None] = {}
"""By kernel, device, constants and widths of numbers; None where Triton has to launch it."""


def _build_of(built: Any) -> _Build | None:
    """What the driver has to know of something that Triton has built, and just launched."""
    try:
        metadata = built.metadata
        needs = (metadata.global_scratch_size, *(getattr(metadata, each, 0) for each in _WATCHED))
        if _launcher() is None or metadata.num_ctas != 1 or any(needs):
            return None
        types = [kind for kind in built.src.signature.values() if kind != "constexpr"]
        return _Build(
            function=int(built.function),
            threads=metadata.num_warps * metadata.target.warp_size,
            shared=metadata.shared,
            kinds=[_KINDS[kind] for kind in types],
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        logger.debug("Triton launches its kernels itself: %r", error)
        return None


_WATCHED = ("profile_scratch_size", "instrumentation_mode")
"""What kernels have that Triton's own tools watch: memory and arguments that only it provides."""


@functools.cache
def _launcher() -> Any:
    """cuLaunchKernel; the GIL is kept, because it returns at once. None without a driver."""
    try:
        launcher = ctypes.PyDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    launcher.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return launcher
