"""Copies of many pieces in one call of the CUDA runtime."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.device.copy_plan import Ints
from kvtier.device.cuda import cuda_runtime
from kvtier.device.cuda.batch_copies import BatchCopy
from kvtier.device.cuda.cuda_runtime import forget_error

logger = logging.getLogger(__name__)


def torch_copy(operation: Callable[[Any, Any, Any, bool], None]) -> BatchCopy:
    """Wrap an operation on tensors of pointers, like vLLM's `swap_blocks_batch`, which takes
    sources first. With drivers before 12.8 it copies piece by piece, and says of no error."""
    import torch

    cudart = cuda_runtime.runtime()

    def copy(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        tensors = [torch.from_numpy(column) for column in (sources, targets, sizes)]
        forget_error(cudart)  # somebody else's
        operation(tensors[0], tensors[1], tensors[2], quiet_source)
        if result := cudart.cudaGetLastError():
            raise RuntimeError(f"a batch of copies: error {result}")
        return tensors

    return copy


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER = 1


_ANY_ORDER = 3


_OVERLAP_WITH_COMPUTE = 1


_UNSUPPORTED = (36, 801)
"""The driver is too old for the call, or the platform does not have it."""


def runtime_copy(torch: Any) -> BatchCopy:
    """cudaMemcpyBatchAsync of the runtime that torch has loaded; piece by piece where that, or the
    driver, is older than 12.8."""
    cudart = cuda_runtime.runtime()
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
