"""vLLM's scheduler and both sides of a connector, around a model that computes nothing.

A step of such an engine takes tens of microseconds, so what a connector adds to it can be seen; and
the calls that it makes can be counted, which no other load on the machine changes. What the
worker's side is asked, and in which order, is what vLLM's second model runner asks, which is the
one that runs on CUDA.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
_STEP_TOKENS = 8192

SCHEDULER_HOOKS = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""What vLLM asks of a connector in a step in which nothing comes or goes."""

_STEP_S = 0.005


class StubEngine:
    """Schedules, executes nothing, and takes note of tokens that nobody has computed.

    `transfer` is the engine's setting of its connector; None is none.
    """

    def __init__(
        self, model: Path, transfer: Mapping[str, Any] | None, blocks: int, requests: int
    ) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "block_size": BLOCK_TOKENS,
            "max_model_len": 16384,
            "max_num_seqs": requests,
            "max_num_batched_tokens": _STEP_TOKENS,
            "prefix_caching_hash_algo": "sha256_cbor",
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = {"kv_role": "kv_both", **transfer}
        self._config = EngineArgs(**arguments).create_engine_config()
        self._config.cache_config.num_gpu_blocks = blocks
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        kept, caches = _caches(blocks)
        self.scheduler = Scheduler(
            vllm_config=self._config,
            kv_cache_config=kept,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.worker: Any = None
        if transfer is not None:
            self.worker = KVConnectorFactory.create_connector(
                self._config, KVConnectorRole.WORKER, kept
            )
            self.worker.register_kv_caches(caches)
        self._serial = itertools.count()

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector."""
        return self.scheduler.connector

    def begin(self, requests: int, tokens: int, *, spread: bool) -> None:
        """Let so many requests decode, with prompts of so many tokens, and step until what they
        store has been stored. If `spread`, their prompts end anywhere in a block, as in life."""
        for _ in range(requests):
            serial = next(self._serial)
            more = spread * (serial % BLOCK_TOKENS)
            self.ask(f"request-{serial}", tokens + more, seed=serial)
        while self._under_way(requests):
            self.step()
            # A model takes as long to compute. Without that, requests whose decoded blocks are kept
            # would store more in each step than is written behind them.
            time.sleep(_STEP_S)

    def ask(self, name: str, tokens: int, seed: int = 0) -> Request:
        """Add a request with so many random tokens."""
        prompt = random.Random(seed).choices(range(256), k=tokens)
        parameters = SamplingParams(max_tokens=8000, temperature=0, ignore_eos=True)
        request = Request(name, prompt, parameters, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def _under_way(self, requests: int) -> bool:
        decoding = [r for r in self.scheduler.running if r.num_output_tokens]
        connector = self.connector
        return len(decoding) < requests or (connector and connector.has_pending_push_work())

    def step(self) -> bool:
        """One step; whether some request crossed the border of a block in it."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        said = None if self.worker is None else self._work(scheduled)
        requests, sampled = self.scheduler.requests, []
        for name in names:
            request = requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=said,
        )
        self.scheduler.update_from_output(scheduled, output)
        return any(scheduled.scheduled_cached_reqs.new_block_ids)

    def _work(self, scheduled: Any) -> KVConnectorOutput:
        """As `ActiveKVConnector` of vllm/v1/worker/gpu/kv_connector.py."""
        worker, output = self.worker, KVConnectorOutput()
        worker.handle_preemptions(scheduled.kv_connector_metadata)
        worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        worker.finish_forward()
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        output.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return output

    def close(self) -> None:
        """End both sides."""
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler.shutdown()

    # -- what a step costs

    @contextmanager
    def _hooked(self, around: Callable[[str, Any], Any]) -> Iterator[None]:
        """Let all that is asked of the connector go by way of this."""
        sides = ((self.connector, SCHEDULER_HOOKS), (self.worker, WORKER_HOOKS))
        for side, names in sides:
            for name in names:
                setattr(side, name, around(name, getattr(side, name)))
        try:
            yield
        finally:
            for side, names in sides:
                for name in names:
                    delattr(side, name)

    def seconds(self, steps: int) -> list[float]:
        """How much of the processor's time each of the next steps takes."""
        found = []
        gc.disable()
        for _ in range(steps):
            begin = time.thread_time()
            self.step()
            found.append(time.thread_time() - begin)
        gc.enable()
        return found

    def hook_seconds(self, steps: int) -> dict[str, list[float]]:
        """How long each hook takes in each of the next steps."""
        spent: dict[str, float] = defaultdict(float)

        def timed(name: str, hook: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                begin = time.perf_counter()
                answer = hook(*arguments, **named)
                spent[name] += time.perf_counter() - begin
                return answer

            return call

        found: dict[str, list[float]] = {name: [] for name in (*SCHEDULER_HOOKS, *WORKER_HOOKS)}
        gc.disable()
        with self._hooked(timed):
            for _ in range(steps):
                spent.clear()
                self.step()
                for name, each in found.items():
                    each.append(spent[name])
        gc.enable()
        return found

    def calls(self, steps: int) -> dict[bool, list[Counter[str]]]:
        """The Python functions that the next steps call in the connector's hooks, by their names;
        apart for steps in which requests cross the border of a block."""
        now: Counter[str] = Counter()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                now[frame.f_code.co_qualname] += 1

        def counted(_: str, hook: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                sys.setprofile(note)
                try:
                    return hook(*arguments, **named)
                finally:
                    sys.setprofile(None)

            return call

        found: dict[bool, list[Counter[str]]] = {True: [], False: []}
        with self._hooked(counted):
            for _ in range(steps):
                now.clear()
                found[self.step()].append(Counter(now))
        return found


def _caches(blocks: int) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """One layer with the smallest KV that there may be."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
    )
    page, name = spec.page_size_bytes, "model.layers.0.self_attn.attn"
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[KVCacheTensor(blocks * page, [name], blocks * page, page)],
        kv_cache_groups=[KVCacheGroupSpec([name], spec)],
        kv_cache_layout="LBHNC",
    )
    return config, {name: torch.zeros(blocks, page, dtype=torch.int8)}


# -- vLLM's own connector, with nothing behind it ----------------------------------------------


class _NoPlace(LoadStoreSpec):  # type: ignore[misc]
    pass


class StubSpec(OffloadingSpec):  # type: ignore[misc]
    """For vLLM's OffloadingConnector: all is taken, at once, and nothing found again."""

    def get_manager(self) -> Any:
        return StubManager()

    def get_worker(self, kv_caches: Any) -> Any:
        return StubWorker()


class StubManager(OffloadingManager):  # type: ignore[misc]
    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        return LookupResult.MISS

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        return _NoPlace()

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        return PrepareStoreOutput(list(keys), _NoPlace(), [])


class StubWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self) -> None:
        self._ended: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._ended.append(TransferResult(job_id, True, 1, 1e-3))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, *_: Any) -> bool:
        raise AssertionError("nothing was found")

    def get_finished(self) -> list[Any]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        pass


OWN = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "spec_name": "StubSpec",
        "spec_module_path": "engines.stub",
    },
}
"""vLLM's own connector over this."""


def kvtier(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Our connector over a stack."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_connector_extra_config": {"stack": dict(stack)},
    }


def main() -> None:
    """Tell, as JSON, what is called in kvtier's hooks in steps of few requests and of many."""
    model, folder, region = map(Path, sys.argv[1:])
    found: dict[str, Any] = {}
    for decoded in (False, True):
        for requests in (4, 64):
            cpu = {"kind": "cpu", "path": str(region), "capacity": "64MiB"}
            nvme = {"kind": "nvme", "path": str(folder), "capacity": "256MiB", "free_floor": 0}
            stack = {"version": 1, "name": f"{requests}-{decoded}", "tiers": [cpu, nvme]}
            transfer = kvtier(stack)
            transfer["kv_connector_extra_config"]["offload_prompt_only"] = not decoded
            engine = StubEngine(model, transfer, requests * 1024 + 16, requests)
            try:
                engine.begin(requests, 300, spread=False)
                found[f"{requests} {decoded}"] = engine.calls(4 * BLOCK_TOKENS)
            finally:
                engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
