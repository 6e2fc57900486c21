"""Launches kernels that Triton has built by the driver alone, without Triton's overhead."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

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


# -- pages -----------------------------------------------------------------------------------
