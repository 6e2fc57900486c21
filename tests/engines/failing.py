"""Steps that fail in an engine that goes on, as with `--enable-fault-tolerance` (which needs ranks
on GPUs)."""

from __future__ import annotations

import queue
from typing import Any


def fail_a_step(core: Any, copies: Any, when: str) -> None:
    """The next step fails on its worker `before` it has begun, `amid` what is computed, `after` all
    that was to be copied; or the one after it fails, when the next has told of all that was
    `ahead`. `copies` is the connector's worker."""
    from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel

    runner = core.model_executor.driver_worker.model_runner
    compute, ended, left = runner.execute_model, copies.take_ended, int(when == "ahead")
    whose, method = (runner.model, "forward") if when == "amid" else (runner, "execute_model")

    def all_ended() -> Any:
        copies.wait(set(copies._worker._numbers))
        return ended()

    def fail(*given: Any, **named: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            return compute(*given, **named)
        if when == "after":
            compute(*given, **named)
        raise RuntimeError("another rank is gone")

    setattr(whose, method, fail)
    if when in ("after", "ahead"):
        copies.take_ended = all_ended
    core.engine_index, core.output_queue = 0, queue.Queue()
    core._send_abort_outputs = lambda _: None
    sentinel = EngineCoreSentinel(core, core.vllm_config.parallel_config)
    try:
        while True:
            core.step_fn()
    except RuntimeError as error:
        sentinel.on_fault(error)
    delattr(whose, method)
    vars(copies).pop("take_ended", None)
    runner.execute_model_state = None  # as workers forget it when they are told to go on
    if hasattr(sentinel, "_drain_batch_queue"):  # from 0.33 on
        sentinel._drain_batch_queue()
