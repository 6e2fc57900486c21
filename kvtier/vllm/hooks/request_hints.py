"""What came with a request about the use of its blocks: hints, and transfer parameters."""

from __future__ import annotations

from typing import Any

from kvtier.vllm.hints import Action


def said_of(request: Any) -> tuple[object, list[Action]]:
    """A request's `kv_transfer_params`, and the actions of its `kv_hints`, which 0.31 has not."""
    hints = getattr(request, "kv_hints", None)
    actions = [
        Action(each.action_type, each.action_version, each.payload)
        for each in (hints.actions if hints is not None else ())
    ]
    return request.kv_transfer_params, actions


def make_keys(connector: Any, request: Any) -> None:
    """Make the keys of all that a request has by now: vLLM makes them when it next looks at it."""
    connector.connector_scheduler._req_status[request.request_id].update_offload_keys()
