"""Models with layers that guess ahead (MTP), as vLLM's own side of the scheduler looks them up.

Those with states or windows are served so on a GPU alone: the kernels for that need one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
from support.scheduler.asking import CHUNK, TWO_GROUPS, host_memory, manager

from kvtier import Stack
from kvtier.testing.subject import payload
from kvtier.types import BlockKey, block_key

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM

HASHES = [bytes([at]) * 32 for at in range(4)]


def scheduler_with_drafter(vllm_manager: Any, beside: str) -> Any:
    """vLLM's side of the scheduler, of a model whose drafter has its layer among those of
    attention, with states or windows beside these, or nothing."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as theirs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    like: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    state = {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    kinds: list[Any] = [FullAttentionSpec(block_size=CHUNK, **like)]
    if beside == "states":
        kinds.append(MambaSpec(block_size=CHUNK, **state))
    elif beside == "windows":
        kinds.append(SlidingWindowSpec(block_size=CHUNK, sliding_window=CHUNK, **like))
    spec = Made(
        config=Made(
            groups=[
                Made(group_id=at, tokens_per_block=CHUNK, sliding_window_size_in_chunks=window)
                for at, window in enumerate([None, 1][: len(kinds)])
            ]
        ),
        blocks_per_chunk=1,
        tokens_per_block=(CHUNK,) * len(kinds),
        tokens_per_hash=CHUNK,
        offload_prompt_only=True,
        extra_config={},
        kv_events_config=Made(enable_kv_cache_events=False, self_describing_kv_events=False),
        get_manager=lambda: vllm_manager,
    )
    groups = [KVCacheGroupSpec([str(kind)], kind) for kind in kinds]
    groups[0].is_eagle_group = True
    return theirs.OffloadingConnectorScheduler(
        spec,
        Made(
            cache_config=Made(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=Made(world_size=1, decode_context_parallel_size=1),
            speculative_config=Made(use_eagle_block_drop=lambda: True),
        ),
        Made(kv_cache_groups=groups, cache_hit_alignment_tokens=None),
    )


@pytest.mark.parametrize(
    ("beside", "kept"), [("states", [2]), ("states", [0, 2]), ("windows", [3]), ("nothing", [])]
)
def test_what_is_kept_beside_a_drafter_is_found(
    tmp_path: Path, beside: str, kept: list[int]
) -> None:
    """Up to where there is a state, which vLLM keeps a block earlier then, or a window."""
    from kvtier.vllm.hooks import cache_groups
    from kvtier.vllm.spec import VllmManager

    keys = [block_key(each, 0) for each in HASHES] + [block_key(HASHES[at], 1) for at in kept]
    found = (max(kept, default=len(HASHES) - 1) + 1) * CHUNK
    with Stack.open(host_memory(tmp_path), TWO_GROUPS) as stack:
        stack.store({BlockKey(key): payload(key, TWO_GROUPS) for key in keys})
        asked = VllmManager(manager(stack).manager, events=False, keeps=False)
        scheduler = scheduler_with_drafter(asked, beside)
        cache_groups.correct_groups(scheduler)
        asked.keep(cache_groups.group_shapes(scheduler), lambda _keys, _context: set())
        request = Made(
            request_id="r",
            kv_transfer_params=None,
            kv_hints=None,
            num_prompt_tokens=len(HASHES) * CHUNK + 9,
            num_tokens=len(HASHES) * CHUNK + 9,
            block_hashes=HASHES,
            skip_reading_prefix_cache=False,
        )
        scheduler.on_new_request(request)
        asked.chain_manager.begin_lookup("r", 0, request.num_tokens, scarce=False)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (found, True)
