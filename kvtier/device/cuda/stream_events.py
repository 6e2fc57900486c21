"""Points in a CUDA stream that can be waited for."""

from __future__ import annotations

from typing import Any

from kvtier.device.accelerator import Event


def event_on(torch: Any, stream: Any) -> Event:
    """The point that a stream has come to, for threads that sleep until then."""
    event: Event = torch.cuda.Event(blocking=True)
    event.record(stream)  # type: ignore[attr-defined]
    return event


def end_of(torch: Any, stream: Any) -> Event:
    """The point that a stream of the copier's has come to. Where no event can be had, the stream
    itself, which can be waited for as well: what it has been given must not outlive its job."""
    try:
        return event_on(torch, stream)
    except RuntimeError:
        own: Event = stream
        return own
