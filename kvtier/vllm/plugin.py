"""What vLLM runs in each of its processes before it reads its settings (`vllm.general_plugins`)."""

from __future__ import annotations

import contextlib

from kvtier.vllm.hooks import config


def load() -> None:
    """Install what must be there before an engine is configured or constructed.

    Engines without kvtier's connector do not notice. A vLLM in which a hook's target has moved must
    start for them all the same: the connector refuses it, and names what has moved.
    """
    for install in (config.refuse_missing_embeddings, config.watch_construction):
        with contextlib.suppress(ImportError, AttributeError):
            install()
