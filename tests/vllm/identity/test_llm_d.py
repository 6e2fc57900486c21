"""What llm-d's router makes of the tiers' events, by its rules (llm-d-router: `pkg/kvevents`,
`pkg/kvcache`), since it is written in Go and runs in a cluster. The rules are these:

- An event is read by position; more fields behind those that it knows are ignored.
- The medium, in lower case, is the tier; without one it is "gpu".
- A block counts if its group is of full attention, if its tokens fill it, and if the block before
  is known. Announcements of a block are counted, and it is gone with the last.
- A pod's score is the sum of the weights of the leading blocks that it has, each in its best tier.
  A tier that is not named in the configuration has `defaultWeight`, which is that of a GPU.
- The events of a pod that is called `pool:NAME` count for every pod.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.scheduler.told_events import (
    CPU_TIER,
    NVME_TIER,
    OBJECT_TIER,
    chunk_of,
    events_with,
    told_of,
)

PAGE = Path(__file__).parents[3] / "docs/guides/routers.md"
STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
REMOVED = ("block_hashes", "medium", "group_idx")
DEFAULT_WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
DEFAULT_WEIGHT = 1.0
PODS = ("one", "two")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


class Router:
    """llm-d's index of blocks, and its scorer."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._known: dict[int, tuple[Any, ...]] = {}
        """Of the engines' hashes: what the router itself makes of the tokens up to there."""
        self._groups: dict[tuple[str, int], str] = {}
        self.held: dict[tuple[Any, ...], set[tuple[str, str]]] = {}
        """Pods and tiers that have a block."""

    def hear(self, topic: str, payload: bytes) -> None:
        pod = topic.split("@")[1]
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            kind, fields = _by_position(event)
            {"BlockStored": self._store, "BlockRemoved": self._remove}[kind](pod, *fields)

    def _store(
        self, pod: str, hashes: Any, parent: Any, tokens: Any, size: int, *more: Any
    ) -> None:
        _, medium, adapter, _, group, kind, _ = more
        tier = medium.lower() if medium else "gpu"
        self._groups[pod, group] = kind
        if kind not in ("full_attention", "mla_attention", "sink_full_attention"):
            return
        if len(tokens) != size * len(hashes) or (parent is not None and parent not in self._known):
            return
        before = self._known[parent] if parent is not None else (adapter,)
        for at, each in enumerate(hashes):
            before = (*before, *tokens[at * size : (at + 1) * size])
            self._known[each] = before
            self.held.setdefault(before, set()).add((pod, tier))
            self._counts[pod, tier, each] += 1

    def _remove(self, pod: str, hashes: Any, medium: Any, group: Any) -> None:
        tier = medium.lower() if medium else "gpu"
        if (pod, group) not in self._groups:
            return
        for each in hashes:
            self._counts[pod, tier, each] -= 1
            if self._counts[pod, tier, each] <= 0:
                del self._counts[pod, tier, each]
                self.held.get(self._known.get(each, ()), set()).discard((pod, tier))

    def scores(
        self, tokens: Sequence[int], size: int, weights: Mapping[str, float], default: float
    ) -> dict[str, float]:
        scores = {}
        for pod in PODS:
            scores[pod], before = 0.0, (None,)
            for at in range(0, len(tokens), size):
                before = (*before, *tokens[at : at + size])
                places = self.held.get(before, set())
                mine = [tier for each, tier in places if each == pod or each.startswith("pool:")]
                if not mine:
                    break
                scores[pod] += max(weights.get(tier, default) for tier in mine)
        return scores


def _by_position(event: Any) -> tuple[str, list[Any]]:
    """vLLM 0.32 and newer sends fields by name, older ones in their order."""
    if isinstance(event, dict):
        order = {"BlockStored": STORED, "BlockRemoved": REMOVED}[event["type"]]
        return event["type"], [event.get(name) for name in order]
    order = {"BlockStored": STORED, "BlockRemoved": REMOVED}[event[0]]
    fields = event[1 : len(order) + 1]
    return event[0], fields + [None] * (len(order) - len(fields))


def encoded(events: list[Any]) -> bytes:
    """As vLLM's publisher does."""
    from vllm.distributed.kv_events import KVEventBatch

    return msgspec.msgpack.Encoder().encode(KVEventBatch(ts=0.0, events=events))


def on_device(number: int) -> Any:
    """vLLM's own event of a prompt of `chunk_of`, whole."""
    from vllm.distributed.kv_events import BlockStored

    from kvtier.vllm.hooks.interfaces import maybe_convert_block_hash

    request, *_ = chunk_of(number)
    hashes = [maybe_convert_block_hash(each) for each in request.block_hashes]
    group = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    return BlockStored(hashes, None, request.all_token_ids, 16, None, "GPU", None, **group)


def stated(page: Path) -> dict[str, float]:
    """The weights that the page says to set."""
    found = re.search(
        r"```yaml\n(- type: precise-prefix-cache-producer\n.*?)```", page.read_text(), re.S
    )
    assert found is not None
    (plugin,) = yaml.safe_load(found[1])
    configs = plugin["parameters"]["indexerConfig"]["kvCacheBackendConfigs"]
    return {each["name"]: each["weight"] for each in configs}


ENTERS, LEAVES = False, True
CASES = {
    # What tiers tell of the prompt's second chunk, of two blocks; its score by default, and as the
    # page has it. Its first chunk is on the device.
    "on the device alone": ([], 2.0, 2.0),
    "in CPU memory": ([(CPU_TIER, ENTERS)], 3.6, 3.6),
    "on the disk": ([(NVME_TIER, ENTERS)], 4.0, 2.8),
    "in CPU memory and on the disk": ([(CPU_TIER, ENTERS), (NVME_TIER, ENTERS)], 4.0, 3.6),
    "on the disk alone": (
        [(CPU_TIER, ENTERS), (NVME_TIER, ENTERS), (CPU_TIER, LEAVES)],
        *(4.0, 2.8),
    ),
    "on the disk, then in the bucket alone": (
        [(NVME_TIER, ENTERS), (OBJECT_TIER, ENTERS), (NVME_TIER, LEAVES)],
        *(4.0, 2.8),
    ),
    "nowhere any more": (
        [(NVME_TIER, ENTERS), (OBJECT_TIER, ENTERS), (NVME_TIER, LEAVES), (OBJECT_TIER, LEAVES)],
        *(2.0, 2.0),
    ),
}


@pytest.mark.parametrize("by_tier", [False, True], ids=["media", "by tier"])
@pytest.mark.parametrize(("told", "default", "as_stated"), CASES.values(), ids=CASES)
def test_a_pods_score(
    told: list[tuple[int, bool]], default: float, as_stated: float, by_tier: bool
) -> None:
    """With its default, what lies on a disk counts as if it were in the GPU."""
    events, chunk = events_with(9, by_tier=by_tier), chunk_of(5)
    request, *_, key = chunk
    events.record_store(*chunk)
    router, first = Router(), on_device(5)
    first.block_hashes, first.token_ids = first.block_hashes[:2], first.token_ids[:32]
    router.hear("kv@one@model", encoded([first]))
    for tier, removed in told:
        published = events.take_events([told_of([key], tier=tier, removed=removed)])
        router.hear("kv@one@model", encoded(published))
    tokens = request.all_token_ids
    scores = router.scores(tokens, 16, DEFAULT_WEIGHTS, DEFAULT_WEIGHT)
    assert scores == {"one": pytest.approx(default), "two": 0.0}
    scores = router.scores(tokens, 16, stated(PAGE), DEFAULT_WEIGHT)
    assert scores == {"one": pytest.approx(as_stated), "two": 0.0}


def test_a_shared_bucket_counts_for_every_pod() -> None:
    """Its events may be passed on under a name of its own, as they say of which tier they are."""
    events, chunk = events_with(9, by_tier=True), chunk_of(5)
    request, *_, key = chunk
    events.record_store(*chunk)
    router, device = Router(), on_device(5)
    device.block_hashes, device.token_ids = device.block_hashes[:2], device.token_ids[:32]
    published = [told_of([key], tier=tier) for tier in (NVME_TIER, OBJECT_TIER)]
    for event in [device, *events.take_events(published)]:
        shared = event.ownership == "object"
        router.hear("kv@pool:bucket@model" if shared else "kv@one@model", encoded([event]))
    router.hear("kv@two@model", encoded([device]))
    scores = router.scores(request.all_token_ids, 16, stated(PAGE), DEFAULT_WEIGHT)
    assert scores == {pod: pytest.approx(2.8) for pod in PODS}


def test_a_block_whose_prompt_is_not_known_counts_nowhere() -> None:
    events, chunk = events_with(9), chunk_of(5)
    events.record_store(*chunk)
    router = Router()
    router.hear("kv@one@model", encoded(events.take_events([told_of([chunk[-1]])])))
    assert router.held == {}
