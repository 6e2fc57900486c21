"""`host.py` with steps that are scheduled ahead: what vLLM does on CUDA, and turns off on a CPU.

What its runner asks of CUDA for it, streams and events, is not there, and not needed: all that this
runner is told to do is done when the call returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

import host


class _Nothing:
    """A stream, or an event, in the order of a program that has one thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Ahead(host.Host):
    """The same commands."""

    def start(self, **arguments: Any) -> dict[str, Any]:
        """Build an engine that does not wait for a step's end before it schedules the next."""
        import torch
        from vllm.platforms.cpu import CpuPlatform

        torch.cuda.Stream = torch.cuda.Event = _Nothing
        torch.cuda.current_stream = _Nothing
        torch.cuda.stream = contextlib.nullcontext
        check = CpuPlatform.check_and_update_config

        def decide(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = staticmethod(decide)
        return super().start(**arguments)

    def is_ahead(self) -> bool:
        """Whether it is so."""
        return self._core.batch_queue is not None

    def _step(self) -> None:
        for _ in range(3):  # until the end of one that is under way has been taken note of
            super()._step()


if __name__ == "__main__":
    host.main(Ahead)
