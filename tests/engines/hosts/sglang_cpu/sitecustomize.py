"""Lets SGLang and its HiCache run on torch for CPUs: a stand-in for what needs CUDA.

Python imports it at the start of each process that has this folder in its PYTHONPATH, SGLang's own
too; only those that import SGLang notice. It stands in for

- `sgl_kernel`, the compiled kernels, none of which the torch_native attention backend calls,
- those of them, and of Triton's, that gated delta net calls (`gated_delta_net.py`),
- the places of windows in torch_native, which takes them for those of the other layers,
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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
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


class Around(NamedTuple):
    """What takes the place of a function, and calls it."""

    made: Callable[[Any], Any]


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
        if module.__name__ == "sgl_kernel.mamba":
            import gated_delta_net
            import torch

            vars(module).update(gated_delta_net.MAMBA)
            vars(torch.ops.sgl_kernel).update(gated_delta_net.OPS)


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
                adapt(module, ADAPTED[name]),
            )[0]
            return spec
        return None


def adapt(module: types.ModuleType, names: dict[str, Any]) -> None:
    """Give names of a module, or of a class in it, another value."""
    for name, value in names.items():
        owner, _, attribute = name.rpartition(".")
        place = getattr(module, owner) if owner else module
        if isinstance(value, Around):
            value = value.made(getattr(place, attribute))
        setattr(place, attribute, value)


def prepare_torch() -> None:
    import torch

    cpu: Any = torch.cpu
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
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


def add_shared_expert(hidden: Any, gate: Any, shared: Any, total: Any) -> None:
    total += (hidden @ gate).sigmoid()[:, None] * shared


def track_states(*arguments: Any, **named: Any) -> None:
    import gated_delta_net

    gated_delta_net.track_states(*arguments, **named)


def in_windows(attend: Any) -> Any:
    """SGLang's own attention for CPUs looks for windows where the other layers' tokens are."""

    def call(
        self: Any,
        query: Any,
        output: Any,
        keys: Any,
        values: Any,
        places: Any,
        rows: Any,
        lengths: Any,
        *more: Any,
        sliding_window_size: int | None = None,
        **named: Any,
    ) -> Any:
        if self.use_sliding_window_kv_pool and sliding_window_size is not None:
            used = places[rows, : int(lengths.max())]
            places = self.token_to_kv_pool.translate_loc_from_full_to_swa(used)
            rows = range(len(used))
        named["sliding_window_size"] = sliding_window_size
        return attend(self, query, output, keys, values, places, rows, lengths, *more, **named)

    return call


COPIES = {
    function.__name__: function
    for function in (
        transfer_kv_direct,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    )
}
ADAPTED: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.mamba_hook": {
        "_platform_supports_mamba_cache_extra_buffer": lambda: True,
    },
    "sglang.srt.layers.attention.torch_native_backend": {
        "TorchNativeAttnBackend._run_sdpa_forward_extend": Around(in_windows),
        "TorchNativeAttnBackend._run_sdpa_forward_decode": Around(in_windows),
    },
    "sglang.kernels.ops.attention.fla.fused_norm_gate": {"_use_cpu": True},
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": {
        "track_mamba_states_all_layers": track_states,
    },
    "sglang.kernels.ops.elementwise.elementwise": {
        "fused_gate_sigmoid_mul_add": add_shared_expert,
    },
    f"{POOLS}.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 0},  # tests need no 10 GiB to spare
    f"{POOLS}.common": {"_cuda_host_register": lambda *_, **__: None},
    f"{POOLS}.mha": COPIES,
    f"{POOLS}.mamba": COPIES,
}
"""Names of SGLang's modules that have another value here."""

sys.meta_path.insert(0, Finder())
