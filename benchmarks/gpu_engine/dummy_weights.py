"""vLLM's dummy weights, such that tokens depend on what is in the KV cache.

vLLM's own are the same small numbers in every tensor: with them an answer hardly depends on its
prompt, and a test of equal tokens would not notice wrong KV. vLLM runs `register` in each of its
processes, as a plugin: by an entry point in a folder of the run's own.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

WIDTH = 0.035
NAME = "gpu_engine_weights-1.dist-info"


def register() -> None:
    """Put ours in the place of vLLM's."""
    from vllm.model_executor.model_loader import dummy_loader

    seeds = itertools.count(1)

    def initialize(param: Any, *_: Any, **__: Any) -> None:
        import torch

        seed = next(seeds)
        if param.device.type == "meta":
            return
        data, value = param.data, getattr(param, "dummy_weight_value", None)
        if value is not None or not torch.is_floating_point(data):
            data.fill_(value or 0)
        elif data.ndim <= 1:  # of norms, mostly
            data.fill_(1.0)
        else:
            generator = torch.Generator(device=data.device).manual_seed(seed)
            small = torch.finfo(data.dtype).bits < 16
            made = torch.empty_like(data, dtype=torch.float16) if small else data
            made.uniform_(-WIDTH, WIDTH, generator=generator)
            if small:
                data.copy_(made)

    dummy_loader.initialize_single_dummy_weight = initialize


def make_findable(folder: Path) -> None:
    """Name the plugin in a folder that is on the engines' path."""
    told = folder / NAME
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-engine-weights\nVersion: 1\n")
    entry = "gpu_engine_weights = benchmarks.gpu_engine.dummy_weights:register"
    (told / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
