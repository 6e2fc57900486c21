"""Sessions, to whose input more is added after each answer, as far as vLLM computes them wrong.

Of an answer that ends amid drafts which were right it takes for computed what comes after it; and a
state has seen tokens that it drops. What it goes on with then is in its own cache, too. And 0.31
leaves a block the name that it has by the token which is dropped from its end.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtier.vllm.hooks import unsupported_modes

logger = logging.getLogger(__name__)


def name_anew(connector: Any, session: Any) -> None:
    """Let blocks have no name of a session's tokens that were dropped for its new input."""
    tokens, names = connector.connector_scheduler.config.tokens_per_hash, session._block_hasher

    def names_of_what_is_there(request: Any) -> Any:
        if not request.num_output_tokens:  # what was computed is in its prompt now
            del request.block_hashes[request.num_computed_tokens // tokens :]
        return names(request)

    session._block_hasher = names_of_what_is_there


class Sessions:
    """Keeps nothing of what may have been computed wrong."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._misread = unsupported_modes.misreads_sessions(vllm_config, kv_cache_config)
        self._shared = vllm_config.cache_config.enable_prefix_caching
        self._said = False

    def spoil(self, connector: Any, scheduled: Any) -> bool:
        """Keep nothing of sessions that a step begins or goes on with, nor of anybody who may find
        in vLLM's own cache what it computes for them: whether others who come may, too."""
        statuses = connector.connector_scheduler._req_status
        came = [new.req_id for new in scheduled.scheduled_new_reqs] if self._misread else []
        sessions = [name for name in came if statuses[name].req.resumable]
        if not sessions:
            return False
        for name in statuses if self._shared else sessions:
            connector.connector_scheduler.manager.keep_no_more(name)
        if not self._said:
            self._said = True
            logger.warning(
                "sessions, to whose input more is added, may be computed wrong by vLLM as this "
                "engine is configured (with states, or with drafts and without scheduling ahead): "
                "nothing is kept of them%s",
                ", nor of others until vLLM's own prefix cache is reset" if self._shared else "",
            )
        return bool(self._shared)
