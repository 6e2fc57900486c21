"""Lets SGLang and its HiCache run on torch for CPUs: a stand-in for what needs CUDA.

Python imports it at the start of each process that has this folder in its PYTHONPATH, SGLang's own
too; only those that import SGLang notice. It stands in for

- `sgl_kernel`, the compiled kernels, none of which the torch_native attention backend calls,
- torchvision's compiled part, of which there is none for this torch: SGLang only imports it,
- streams and events, which torch for CPUs lacks in part: all work is done when it is asked for,
- pinned memory, and SGLang's copies between host memory and the device.

SGLang would start its processes anew; here they are forked, since most of their start is importing.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

POOLS = "sglang.srt.mem_cache.pool_host"


class Event:
    """A point that has been reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """A stream that is never behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = synchronize

    def record_event(self, *_: Any) -> Event:
        return Event()


class Kernels(types.ModuleType):
    """A module in which any name is some function."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Finder(importlib.abc.MetaPathFinder):
    """Prepares torch when SGLang is imported, and finds its kernels."""

    def __init__(self) -> None:
        self._prepared = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)
        if name in ("sglang", "torchvision") and not self._prepared:
            self._prepared = True
            multiprocessing.set_start_method("fork", force=True)
            multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
            prepare_torch()
        if name in ADAPTED:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            assert spec is not None
            assert spec.loader is not None
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (  # type: ignore[method-assign]
                load(module),
                vars(module).update(ADAPTED[name]),
            )[0]
            return spec
        return None


def prepare_torch() -> None:
    import torch

    cpu: Any = torch.cpu
    cpu.Event, cpu.Stream = Event, Stream
    cpu.stream = lambda _: contextlib.nullcontext()
    cpu.current_stream = lambda *_: Stream()
    for name in ("zeros", "empty"):
        setattr(torch, name, pageable(getattr(torch, name)))
    register = torch.library.register_fake

    def register_fake(op: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *arguments, **named)

    torch.library.register_fake = register_fake
    prepare_torch.library = torch.library.Library("torchvision", "DEF")  # type: ignore
    prepare_torch.library.define(  # type: ignore[attr-defined]
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )


def pageable(make: Any) -> Any:
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        return make(*arguments, **named)

    return made


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """From the layers of the device, keys before values, to pages that hold all layers."""
    pages, places = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, source in enumerate(src_ptrs):
        dst_ptrs[at // layers][pages, at % layers, places] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer, the other way."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, places]


def transfer_kv_direct(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


ADAPTED: dict[str, dict[str, Any]] = {
    f"{POOLS}.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 0},  # tests need no 10 GiB to spare
    f"{POOLS}.common": {"_cuda_host_register": lambda *_, **__: None},
    f"{POOLS}.mha": {
        "transfer_kv_direct": transfer_kv_direct,
        "transfer_kv_all_layer_direct_lf_pf": transfer_kv_all_layer_direct_lf_pf,
        "transfer_kv_per_layer_direct_pf_lf": transfer_kv_per_layer_direct_pf_lf,
    },
}
"""Names of SGLang's modules that have another value here."""

sys.meta_path.insert(0, Finder())
