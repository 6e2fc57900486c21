"""An SGLang engine with HiCache that does what it is told: one JSON line a command, as `host.py`.

Its scheduler is a process of its own: what the tiers hold is seen from outside.
"""

from __future__ import annotations

import asyncio
from typing import Any

from host import main

ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "page_size": 64,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.8,  # others take memory meanwhile
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "enable_cache_report": True,
    "skip_server_warmup": True,
    "random_seed": 0,
    "log_level": "info",
}
HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_size": 1,
    "hicache_io_backend": "direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}


class SglangHost:
    """The commands."""

    def start(self, model: str, storage: str | None = None, **arguments: Any) -> None:
        """Build the engine; with HiCache, if the settings of its storage are given."""
        import sglang

        named: dict[str, Any] = dict(ENGINE)
        if storage is not None:
            named |= HICACHE
            named["hicache_storage_backend"] = "dynamic"
            named["hicache_storage_backend_extra_config"] = storage
        self._engine = sglang.Engine(model_path=model, **(named | arguments))

    def generate(self, prompts: list[list[int]], tokens: int = 16) -> list[dict[str, Any]]:
        """Greedy continuations, one after the other."""
        parameters = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        answers = [
            self._engine.generate(input_ids=each, sampling_params=parameters) for each in prompts
        ]
        return [
            {
                "tokens": each["output_ids"],
                "cached": each["meta_info"]["cached_tokens"],
                "stored": (each["meta_info"].get("cached_tokens_details") or {}).get("storage", 0),
            }
            for each in answers
        ]

    def forget_memory(self) -> bool:
        """Empty SGLang's caches on the device and in host memory."""
        return bool(self._engine.flush_cache().success)

    def forget_storage(self) -> bool:
        """What `/clear_hicache_storage_backend` does."""
        manager = self._engine.tokenizer_manager
        return bool(self._wait(manager.clear_hicache_storage()).success)

    def take_weights(self, folder: str) -> None:
        success, message, *_ = self._engine.update_weights_from_disk(folder)
        if not success:
            raise RuntimeError(message)

    def shut_down(self) -> None:
        self._engine.shutdown()

    def _wait(self, coroutine: Any) -> Any:
        loop = getattr(self._engine, "loop", None) or asyncio.get_event_loop()
        return loop.run_until_complete(coroutine)


if __name__ == "__main__":
    main(SglangHost)  # type: ignore[arg-type]
