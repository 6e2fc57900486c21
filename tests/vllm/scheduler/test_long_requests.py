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

    from kvtier.vllm.hooks import request_states

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
    request_states.heed_whole_chunks(
        Made(connector_scheduler=Made(_req_status={"r": status})), request
    )
    for more, walks, known in [(0, 2, [2, 1]), (2, 2, [2, 1]), (1, 4, [3, 1]), (4, 6, [4, 2])]:
        hashes.extend([bytes([len(hashes) + at]) * 32 for at in range(more)])
        for _ in range(3):
            status.update_offload_keys()
        assert hashes.walks == walks
        assert [len(state.offload_keys) for state in status.group_states] == known
    keys = status.group_states[0].offload_keys
    assert [key[:1] for key in keys] == [bytes([at]) for at in (3, 7, 11, 15)]
