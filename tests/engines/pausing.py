"""How vLLM steps an engine that is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def as_in_its_own_process(core: Any) -> Callable[[], Any]:
    """An engine in a process of its own, as it is served, pauses after a step without tokens; else
    it takes Python's lock from the threads that it waits for."""
    step = core.step_fn

    def step_and_pause() -> Any:
        outputs, model_executed = step()
        if not model_executed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, model_executed

    return step_and_pause
