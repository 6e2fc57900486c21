"""The parts of the copiers that meet torch and Triton, as far as they go without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.device.cpu_copy import PageCopier, host_arrays
from kvtier.device.layout import DeviceLayout

pytestmark = pytest.mark.vllm

_KERNEL = """
import numpy as np, torch
from kvtier.device.kernels import scatter
rng = np.random.default_rng(0)
source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
target, wanted = np.zeros_like(source), np.zeros_like(source)
sizes = rng.integers(1, 3000, 37) * 8
starts = np.concatenate([[0], np.cumsum(sizes + 64)[:-1]])
order = rng.permutation(37)
places = np.empty(37, np.int64)
places[order] = np.concatenate([[0], np.cumsum(sizes[order] + 64)[:-1]])
for start, place, size in zip(starts, places, sizes):
    wanted[place : place + size] = source[start : start + size]
table = np.stack([target.ctypes.data + places, source.ctypes.data + starts, sizes])
scatter(torch.from_numpy(table.astype(np.int64)), 37)
assert (target == wanted).all() and wanted.any()
"""


def test_the_kernel_copies_pieces_of_any_size() -> None:
    """In Triton's interpreter, which runs the same program on the CPU."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", _KERNEL], env=environment, check=True, timeout=120)


def canonical(tensor: Any, pages: list[tuple[int, int]]) -> Any:
    """Caches over one packed tensor of bytes, as vLLM views them: (offset, size) of each page."""
    import torch

    stride = tensor.stride(0)
    views = [
        torch.as_strided(tensor, (tensor.shape[0], size), (stride, 1), at) for at, size in pages
    ]
    return SimpleNamespace(
        tensors=[
            SimpleNamespace(tensor=view, page_size_bytes=size)
            for view, (_, size) in zip(views, pages, strict=True)
        ],
        group_data_refs=[
            [
                SimpleNamespace(tensor_idx=index, page_size_bytes=size)
                for index, (_, size) in enumerate(pages)
            ]
        ],
    )


def test_torch_tensors_are_copied_in_place() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randint(-128, 127, (16, 96), dtype=torch.int8)
    before = tensor.clone()
    caches = canonical(tensor, [(0, 32), (32, 32), (64, 24)])
    layout = DeviceLayout.of_caches(caches, 2)
    assert layout.tensors[1].base == tensor.data_ptr() + 32
    copier = PageCopier(layout, host_arrays(caches))
    part = memoryview(bytearray(layout.part_bytes[0]))
    copier.gather(0, [3, 9], 0, part)
    found = np.frombuffer(part, np.int8)
    assert (found[:32] == before[3, :32].numpy()).all()
    assert (found[32:64] == before[9, :32].numpy()).all()
    assert (found[-24:] == before[9, 64:88].numpy()).all()
    copier.scatter(0, [12, 13], 0, part)
    assert (tensor[12, :88] == before[3, :88]).all()
    assert (tensor[13, :88] == before[9, :88]).all()
    assert (tensor[12, 88:] == before[12, 88:]).all()
