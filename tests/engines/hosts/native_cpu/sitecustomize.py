"""Lets a server offload by vLLM's own tiering on the CPU platform, which it does not serve.

Python imports it at the start of each process that has this folder in its PYTHONPATH, vLLM's own
too. The worker, which copies between device and CPU memory, is that of `native.py`; and `kvtier
serve` takes this vLLM for one with a GPU, which it would refuse otherwise.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import msgspec


def tiering_spec(module: Any) -> None:
    from native import CpuTieringSpec

    module.TieringOffloadingSpec.get_worker = CpuTieringSpec.get_worker


def serve(module: Any) -> None:
    find = module.installed
    module.installed = lambda: msgspec.structs.replace(find(), cpu=False)


ADAPTED = {"vllm.v1.kv_offload.tiering.spec": tiering_spec, "kvtier.cli.serve": serve}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ADAPTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (  # type: ignore[method-assign]
            load(module),
            ADAPTED[name](module),
        )[0]
        return spec


sys.meta_path.insert(0, Finder())
