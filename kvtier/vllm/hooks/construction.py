"""What an engine is configured with for its connector, and for the MultiConnector above it, if any.

A MultiConnector gives each of its connectors a copy of the configuration, in which its own settings
are missing. vLLM makes the outermost connector in one place: there its configuration is noted, for
as long as it and those below it are constructed. This must be in place before the engine begins to
construct anything, so vLLM's plugins set it up (kvtier/vllm/plugin.py).
"""

from __future__ import annotations

import functools
from typing import Any

from kvtier.errors import ConfigError

_outermost: list[Any] = []
"""The configuration of the connector that is under construction, if any."""
_watched = False


def watch() -> None:
    """Note from now on what connectors are constructed from."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    global _watched
    if _watched:
        return
    create = KVConnectorFactory.create_connector

    @functools.wraps(create)
    def create_connector(config: Any, *arguments: Any, **named: Any) -> Any:
        _outermost.append(config)
        try:
            return create(config, *arguments, **named)
        finally:
            _outermost.pop()

    KVConnectorFactory.create_connector = staticmethod(create_connector)
    _watched = True


def transfer_configs(vllm_config: Any) -> list[Any]:
    """What is set for a connector that is under construction, and for the one above it, if any;
    raises ConfigError where nobody can know. vLLM reads the policy for failed loads in the last."""
    if not _watched:
        raise ConfigError(
            "VLLM_PLUGINS",
            "kvtier's plugin for vLLM was not run, without which it does not learn what else the "
            "engine is configured with",
            "add kvtier to this variable if it is set; else pip install kvtier beside vLLM",
        )
    own = vllm_config.kv_transfer_config
    above = _outermost[-1].kv_transfer_config if _outermost else own
    return [own] if above is own else [own, above]


def deals_out_blocks(vllm_config: Any) -> bool:
    """Whether workers will let the ranks that share a context take turns at whole blocks of it: in
    0.31 and 0.32 they do beside vLLM's Nixl, unless something else was said, and tell nobody."""
    ranks = vllm_config.parallel_config
    if ranks.decode_context_parallel_size == 1 or not ranks._allow_auto_resolve_cp_interleave_size:
        return False
    outermost = transfer_configs(vllm_config)[-1]
    return outermost is not None and bool(outermost.has_connector("NixlConnector"))


def register(connector: type) -> None:
    """Let vLLM find a connector by its name alone, too.

    So it looks for those below a MultiConnector when their counters come from another process, and
    the server ends if it does not find one.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)
