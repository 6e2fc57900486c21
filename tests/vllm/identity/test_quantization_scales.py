"""KV cache that is quantized by token and head, whose scales lie in the blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_scales_that_are_loaded_stay_as_they_are() -> None:
    """vLLM's first step sets all scales of a layer, unless that was done before."""
    import torch
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import KVQuantMode

    from kvtier.vllm.hooks.failure_tolerant_worker import set_scales

    def layer() -> Any:
        attention = TritonAttentionImpl.__new__(TritonAttentionImpl)
        attention._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD
        attention._is_per_token_head_quant = True
        cache = torch.zeros(3, 2, 16, 2 * (64 + 4), dtype=torch.int8)
        return SimpleNamespace(impl=attention, kv_cache=cache)

    ready, other = layer(), layer()
    layers = {"ready": ready, "no attention": object(), "plain": SimpleNamespace(impl=object())}
    set_scales(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)))
    loaded = torch.arange(ready.kv_cache.numel()).remainder(127).to(torch.int8)
    for each in (ready, other):
        each.kv_cache.copy_(loaded.view(each.kv_cache.shape))
        each.impl._pth_key_value_caches(each.kv_cache)
    assert torch.equal(ready.kv_cache.flatten(), loaded)
    assert not torch.equal(other.kv_cache.flatten(), loaded)
