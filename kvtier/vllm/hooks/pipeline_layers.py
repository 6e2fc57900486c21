"""How the ranks of a pipeline share layers out: the scheduler is told of the first one's alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.utils import get_pp_indices


def most_layers(vllm_config: Any, groups: Sequence[Any]) -> list[int]:
    """Of each cache group, the most layers that any rank holds; those of the first rank, where
    nothing is known of the others.

    vLLM gives every so many-th layer of a kind to a group, so that each rank has nearly as many.
    """
    first = [len(group.layer_names) for group in groups]
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    if ranks == 1:
        return first
    model = vllm_config.model_config
    total = model.get_total_num_hidden_layers()
    kinds = getattr(model.hf_text_config, "layer_types", None)
    kinds = ["any"] * total if len(groups) == 1 else kinds
    spans = [get_pp_indices(total, rank, ranks) for rank in range(ranks)]
    if not kinds or len(kinds) != total or sum(first) != spans[0][1] - spans[0][0]:
        return first
    holds = [{kinds[_index(name)] for name in group.layer_names} for group in groups]
    if any(len(each) != 1 for each in holds):
        return first
    found = []
    for (kind,), count in zip(holds, first, strict=True):
        most = max(kinds[start:stop].count(kind) for start, stop in spans)
        found.append(max(count, -(-most // holds.count({kind}))))
    return found


def _index(layer_name: str) -> int:
    return next(int(part) for part in layer_name.split(".") if part.isdigit())
