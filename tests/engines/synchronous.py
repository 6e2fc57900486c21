"""What vLLM's scheduler makes of a load that ends within the step that uses it, and fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stub import BLOCK_TOKENS, StubEngine
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

BLOCKS, BAD = 10, 3


def main() -> None:
    """Tell what the next request with the same prompt is given of the first one's blocks."""
    stub = {"spec_name": "StubSpec", "spec_module_path": StubEngine.__module__}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": stub,
        "kv_load_failure_policy": "recompute",
    }
    engine = StubEngine(Path(sys.argv[1]), transfer, 64, 4)
    scheduler = engine.scheduler
    hits = {"first": BLOCKS * BLOCK_TOKENS}

    def found(request: Any, computed: int) -> tuple[int, bool]:
        return hits.pop(request.request_id, computed) - computed, False

    engine.connector.get_num_new_matched_tokens = found
    engine.connector.update_state_after_alloc = lambda *_: None
    first = engine.ask("first", BLOCKS * BLOCK_TOKENS + 1)
    step = scheduler.schedule()
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("first")
    said = KVConnectorOutput(invalid_block_ids={blocks[BAD]})
    output = ModelRunnerOutput(["first"], {"first": 0}, [[7]], kv_connector_output=said)
    scheduler.update_from_output(step, output)
    kept = first.num_computed_tokens
    scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    engine.ask("second", BLOCKS * BLOCK_TOKENS + 1)
    next_step = scheduler.schedule()
    (given,) = scheduler.kv_cache_manager.get_block_ids("second")
    answer = {
        "synchronous": step.has_sync_kv_loads,
        "kept": kept // BLOCK_TOKENS,
        "computed": next_step.num_scheduled_tokens["second"],
        "bad block is given": given[BAD] == blocks[BAD],
    }
    engine.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
