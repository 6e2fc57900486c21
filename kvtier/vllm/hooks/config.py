"""What is changed where vLLM reads its configuration and constructs its connectors.

vLLM's plugins install both hooks before an engine is configured (kvtier/vllm/plugin.py):

- A MultiConnector gives each of its connectors a copy of the configuration, without its own
  settings. `watch_construction` notes the configuration of the outermost connector while that and
  those below it are constructed.
- vLLM assumes that any connector that loads blocks may bring those of images that another engine
  has seen. So it lets clients send embeddings in place of images, and leave them out; here that
  ends the engine. `refuse_missing_embeddings` lets clients send what they may send without kvtier.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from kvtier.errors import ConfigError

OURS = "KVTierConnector"


class _Construction(NamedTuple):
    """A connector under construction, and what it is constructed from."""

    config: Any
    cache_config: Any


_outermost: list[_Construction] = []
"""That of the connector that is under construction, if any, and of those below it."""
_watched = False


def watch_construction() -> None:
    """Note from now on what connectors are constructed from."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    global _watched
    if _watched:
        return
    create = KVConnectorFactory.create_connector

    @functools.wraps(create)
    def create_connector(config: Any, role: Any, kv_cache_config: Any) -> Any:
        _outermost.append(_Construction(config, kv_cache_config))
        try:
            return create(config, role, kv_cache_config)
        finally:
            _outermost.pop()

    KVConnectorFactory.create_connector = staticmethod(create_connector)
    _watched = True


def transfer_configs(vllm_config: Any) -> list[Any]:
    """The transfer configuration of a connector that is under construction, and of the one above
    it, if any; vLLM reads the policy for failed loads in the last. Raises ConfigError if
    construction is not watched."""
    _check_watched()
    own = vllm_config.kv_transfer_config
    above = _outermost[-1].config.kv_transfer_config if _outermost else own
    return [own] if above is own else [own, above]


def under_construction() -> tuple[Any, Any]:
    """The configurations of the engine whose connector is under construction: vLLM's, and that of
    its KV cache. Raises ConfigError if construction is not watched."""
    _check_watched()
    if not _outermost:
        raise ConfigError(
            "secondary_tiers",
            "vLLM builds this tier where it builds no connector",
            "set it in the kv_connector_extra_config of an OffloadingConnector",
        )
    return _outermost[-1]


def _check_watched() -> None:
    if not _watched:
        raise ConfigError(
            "VLLM_PLUGINS",
            "kvtier's plugin for vLLM was not run, without which it does not learn what else the "
            "engine is configured with",
            "add kvtier to this variable if it is set; else pip install kvtier beside vLLM",
        )


def register(connector: type) -> None:
    """Let vLLM find a connector by its name alone. It does so for those below a MultiConnector when
    their counters come from another process, and the server ends if it finds none."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)


@functools.cache
def refuse_missing_embeddings() -> None:
    """Let clients of an engine with kvtier send what they may send to one without; once."""
    from vllm.config import VllmConfig

    resolve = VllmConfig._resolve_mm_embedding_inputs

    @functools.wraps(resolve)
    def resolve_unless_ours(config: Any) -> None:
        if not brings_no_embeddings(config):
            resolve(config)

    VllmConfig._resolve_mm_embedding_inputs = resolve_unless_ours


def brings_no_embeddings(config: Any) -> bool:
    """Whether kvtier's is the only connector of this engine."""
    blocks, embeddings = config.kv_transfer_config, config.ec_transfer_config
    return (
        blocks is not None
        and blocks.kv_connector == OURS
        and not (embeddings is not None and embeddings.is_ec_consumer)
    )
