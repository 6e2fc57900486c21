"""Whether clients may send embeddings in place of images.

vLLM believes of every connector that loads blocks that they may be of images that were seen
elsewhere: all clients may send embeddings in place of images then, and leave them out. Nobody
brings such blocks here, and one request like that ends the engine.
"""

from __future__ import annotations

import functools
from typing import Any

OURS = "KVTierConnector"


@functools.cache
def allow_as_without_us() -> None:
    """Let clients of an engine with our connector send what they may send to one without; once."""
    from vllm.config import VllmConfig

    resolve = VllmConfig._resolve_mm_embedding_inputs

    @functools.wraps(resolve)
    def resolve_as_without_us(config: Any) -> None:
        if not brings_no_embeddings(config):
            resolve(config)

    VllmConfig._resolve_mm_embedding_inputs = resolve_as_without_us


def brings_no_embeddings(config: Any) -> bool:
    """Whether ours is the only connector of this engine."""
    blocks, embeddings = config.kv_transfer_config, config.ec_transfer_config
    return (
        blocks is not None
        and blocks.kv_connector == OURS
        and not (embeddings is not None and embeddings.is_ec_consumer)
    )
