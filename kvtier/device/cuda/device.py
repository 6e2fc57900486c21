"""CUDA through torch: streams, events, pinning, and copies of many pieces in one call.

Written against CUDA 12.8 to 13; docs/how_it_works/gpu.md says what of it has run on a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.device.copier import ERRORS, CopyStream, Stage, StreamEvent
from kvtier.device.cuda import runtime as cuda_runtime
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.cuda.runtime import (
    BatchCopy,
    cores_near,
    end_of,
    event_on,
    few_at_once,
    forget_error,
    leave_captures_alone,
    runtime_copy,
)
from kvtier.device.direct import DirectLoader
from kvtier.device.layout import DeviceLayout, Ints, PageCopies
from kvtier.device.pinned import PinnedMemory, PinPlan
from kvtier.device.records import RankRecords
from kvtier.errors import MediumError
from kvtier.interfaces.handler import HostSlots
from kvtier.system.memory import Topology, bind_thread

if TYPE_CHECKING:
    from kvtier.device.cuda.staging_buffers import Staging

logger = logging.getLogger(__name__)


class Cuda:
    """One CUDA device as the copier's accelerator."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch: Any = torch
        self._index = index
        self.cudart: Any = torch.cuda.cudart()
        """What torch offers of the runtime, the GIL released meanwhile."""
        self.batch_copy = few_at_once(runtime_copy(torch))
        self.cores = cores_near(index, Topology())
        self._staging: Staging | None = None

    def attach(self) -> None:
        self._torch.cuda.set_device(self._index)
        leave_captures_alone()
        bind_thread(self.cores)

    def mark(self) -> StreamEvent:
        return event_on(self._torch, self._torch.cuda.current_stream(self._index))

    def stream(self, *, urgent: bool) -> CopyStream:
        stream = self._torch.cuda.Stream(self._index, priority=-1 if urgent else 0)
        return CudaStream(self._torch, stream, self.batch_copy)

    def stages(self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool) -> Sequence[Stage]:
        if self._staging is None:
            self._staging = staging(self._torch, self._index, layout, self.batch_copy)
        return self._staging.stages(batch_bytes, urgent=urgent)


def staging(torch: Any, index: int, layout: DeviceLayout, batch_copy: BatchCopy) -> Staging:
    """What staged copies have in common, tried out; raises RuntimeError where they do not work."""
    try:
        from kvtier.device.cuda.staging_buffers import Staging, try_out
    except ImportError as error:
        raise RuntimeError(f"no Triton ({error})") from error
    # Not on the default stream: it may be the engine's, and forbidden while a graph is captured.
    with torch.cuda.stream(torch.cuda.Stream(index)):
        try_out(torch, index, batch_copy)
        return Staging(torch, index, layout, batch_copy)


_BUILD_SECONDS = 120.0
"""For so long an engine's start waits for kernels; they may come later, too."""


def build_kernels(index: int) -> None:
    """Build what staged copies need, before an engine serves: later its first requests would wait,
    and vLLM looks out for kernels that are built then, and may forbid it. If it cannot be done,
    that is said when a copier is opened.

    By a thread of its own: what the engine's thread takes of the device just now may be memory that
    is given back while the engine sleeps.
    """

    def build() -> None:
        try:
            import torch

            from kvtier.device.cuda.staging_buffers import try_out

            torch.cuda.set_device(index)
            leave_captures_alone()
            with torch.cuda.stream(torch.cuda.Stream(index)):
                try_out(torch, index, few_at_once(runtime_copy(torch)))
        except (ImportError, *ERRORS) as error:
            logger.debug("no kernels were built for copies: %s", error)

    thread = threading.Thread(target=build, name="kvtier-build", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system gives no more threads
        logger.debug("no kernels were built for copies: %s", error)
    else:
        thread.join(_BUILD_SECONDS)


class CudaStream:
    """A stream of our own."""

    def __init__(self, torch: Any, stream: Any, batch_copy: BatchCopy) -> None:
        self._torch = torch
        self._stream = stream
        self._batch_copy = batch_copy

    def to_device(self, copies: PageCopies) -> object:
        return self._copy(copies.device, copies.host, copies.sizes, True)

    def to_host(self, copies: PageCopies) -> object:
        return self._copy(copies.host, copies.device, copies.sizes, False)

    def _copy(self, targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        with self._torch.cuda.stream(self._stream):
            return self._batch_copy(targets, sources, sizes, quiet_source)

    def record(self) -> StreamEvent:
        return end_of(self._torch, self._stream)


def open_copier(
    layout: DeviceLayout,
    host: HostSlots,
    namespace: bytes,
    *,
    index: int,
    plan: PinPlan | None = None,
    open_direct: Callable[[], DirectLoader | None] | None = None,
) -> CudaCopier:
    """A copier between a CUDA device and a region, which it pins as planned.

    Raises MediumError if the device cannot be used.
    """
    plan = plan or PinPlan()
    try:
        device = Cuda(index)
        registrar, slot_bytes = CudaRegistrar(device.cudart), len(host.record(0))
        memory = PinnedMemory(host.data, slot_bytes, registrar, plan, cores=device.cores)
        records = RankRecords(layout, host, namespace)
        return CudaCopier(records, device, memory=memory, open_direct=open_direct, steps=plan.steps)
    except RuntimeError as error:
        raise MediumError(f"the CUDA device {index} cannot be used for copies ({error})") from error


class CudaRegistrar:
    """Pins host memory for all contexts of the process."""

    def __init__(self, cudart: Any) -> None:
        self._runtime = cudart

    def register(self, address: int, size: int) -> str | None:
        result = _code(self._runtime.cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if result:
            forget_error(cuda_runtime.runtime())
        return f"CUDA error {result}" if result else None

    def unregister(self, address: int) -> None:
        result = _code(self._runtime.cudaHostUnregister(address))
        if result:
            forget_error(cuda_runtime.runtime())
            logger.warning("unpinning memory failed (CUDA error %d)", result)


_PORTABLE, _MAPPED = 1, 2


def _code(result: Any) -> int:
    """The number of an error, which torch wraps in a type of its own."""
    return int(getattr(result, "value", result))
