"""What a step costs does not grow with what a request has behind it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace as Made
from typing import Any

import pytest

importing = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


class Counted(list[bytes]):
    """Tells how often somebody went through it."""

    walks = 0

    def __iter__(self) -> Iterator[bytes]:
        self.walks += 1
        return super().__iter__()


@importing
def test_block_hashes_are_gone_through_when_a_chunk_is_whole() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as theirs

    from kvtier.vllm.hooks import compat

    hashes = Counted(bytes([at]) * 32 for at in range(9))
    request: Any = Made(request_id="r", block_hashes=hashes, kv_transfer_params=None, kv_hints=None)
    groups = [
        Made(group_idx=at, hashes_per_chunk=each, tokens_per_chunk=16 * each)
        for at, each in enumerate((4, 8))
    ]
    status = theirs.RequestOffloadState(
        config=Made(kv_group_configs=groups),
        req=request,
        req_context=theirs._create_req_context(request),
        offloading_context=None,
    )
    compat.heed_whole_chunks(Made(connector_scheduler=Made(_req_status={"r": status})), request)
    for more, walks, known in [(0, 2, [2, 1]), (2, 2, [2, 1]), (1, 4, [3, 1]), (4, 6, [4, 2])]:
        hashes.extend([bytes([len(hashes) + at]) * 32 for at in range(more)])
        for _ in range(3):
            status.update_offload_keys()
        assert hashes.walks == walks
        assert [len(state.offload_keys) for state in status.group_states] == known
    keys = status.group_states[0].offload_keys
    assert [key[:1] for key in keys] == [bytes([at]) for at in (3, 7, 11, 15)]


@importing
@pytest.mark.parametrize(("prompt_only", "left"), [(True, [40, 24]), (False, [40, 40])])
def test_blocks_that_are_decoded_are_not_looked_at(prompt_only: bool, left: list[int]) -> None:
    """A prompt of 203 tokens in blocks of 8, of which a chunk has 2; 320 tokens by now."""
    from kvtier.vllm.hooks import compat

    groups = [
        Made(tokens_per_chunk=16, sliding_window_size_in_chunks=window) for window in (None, 3)
    ]
    states = [Made(block_ids=list(range(1, 41))) for _ in groups]
    status = Made(req=Made(num_prompt_tokens=203), group_states=states)
    scheduler = Made(
        config=Made(kv_group_configs=groups, blocks_per_chunk=2, offload_prompt_only=prompt_only),
        _req_status={"r": status, "other": Made()},
    )
    scheduled = Made(
        scheduled_cached_reqs=Made(req_ids=["other", "r"], new_block_ids=[None, ([41], [41])])
    )
    compat.forget_decoded(Made(connector_scheduler=scheduler), scheduled)
    assert [len(state.block_ids) for state in states] == left
    assert states[1].block_ids[:24] == list(range(1, 25))
