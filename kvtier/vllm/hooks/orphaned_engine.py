"""An engine whose server was killed ends as well.

vLLM's engine does not notice when the process that started it is killed
(https://github.com/vllm-project/vllm/issues/55510). It would stay for good,
and keep what the next server needs: the device's memory, and blocks in CPU memory, which have one
owner.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

logger = logging.getLogger(__name__)

_ENGINE = "EngineCore"
"""What vLLM calls its engines' processes. Elsewhere an engine shares the process of somebody else,
who decides on it."""
_CLOSING_S = 30.0


def has_own_process() -> bool:
    """Whether this process is an engine's; else the engine shares that of its caller, and steps
    without a pause while it only waits."""
    return multiprocessing.current_process().name.startswith(_ENGINE)


def end_with_parent() -> None:
    """Close this process, if it is an engine's, when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None and has_own_process():
        threading.Thread(target=_watch, args=(parent,), name="kvtier-parent", daemon=True).start()


def _watch(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    logger.warning("the server that started this engine is gone: the engine closes, too")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_CLOSING_S)
    os.kill(os.getpid(), signal.SIGKILL)
