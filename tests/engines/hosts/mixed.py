"""`host.py` with a model whose layers differ in size: every second one has one KV head only."""

from __future__ import annotations

from typing import Any

import host


class Mixed(host.Host):
    """The same commands."""

    def start(self, **arguments: Any) -> dict[str, Any]:
        """Build the engine; its weights are random, and such that all that is cached matters."""
        import torch
        from vllm.model_executor.models.llama import LlamaAttention

        init = LlamaAttention.__init__

        def build(self: Any, *positional: Any, prefix: str, **named: Any) -> None:
            if int(prefix.split(".")[-2]) % 2:
                named["num_kv_heads"] = 1
            init(self, *positional, prefix=prefix, **named)

        LlamaAttention.__init__ = build
        found = super().start(load_format="dummy", **arguments)
        torch.manual_seed(0)
        for weights in self._core.model_executor.driver_worker.model_runner.model.parameters():
            if weights.dim() > 1:
                weights.data.normal_(0, 0.1)
        return found


if __name__ == "__main__":
    host.main(Mixed)
