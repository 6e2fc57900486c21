"""What vLLM runs in each of its processes before it reads its settings (`vllm.general_plugins`)."""

from __future__ import annotations

import contextlib

from kvtier.vllm.hooks import construction, embedding_inputs


def load() -> None:
    """Put in place what must be there before an engine is configured or constructed.

    Engines without a connector of ours do not notice. A vLLM in which one of these has moved must
    start for them all the same: our connector refuses it, and names what has moved, where it is
    used.
    """
    for prepare in (embedding_inputs.allow_as_without_us, construction.watch):
        with contextlib.suppress(ImportError, AttributeError):
            prepare()
