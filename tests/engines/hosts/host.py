"""A vLLM engine in a process of its own that does what it is told: one JSON line a command.

    python host.py FD      # answers are written to the file descriptor FD

Scheduler and worker live in this process, so that a command can look at both.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slowed import Slowed

SETTLE_S = 300.0


class Host(Slowed):
    """The commands; each method whose name does not begin with `_` is one."""

    def __init__(self) -> None:
        super().__init__()
        self._llm: Any = None
        self._serial = self._which = 0
        self._ended: dict[str, dict[str, Any]] = {}

    def start(
        self, pretend: str | None = None, pooling: str | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Build the engine; as another version of vLLM, or for embeddings, if any are named."""
        import vllm
        from vllm import LLM
        from vllm.config import PoolerConfig

        vllm.__version__ = pretend or vllm.__version__
        _go_easy_on_processors()
        if pooling:
            arguments["runner"] = "pooling"
            arguments["pooler_config"] = PoolerConfig(seq_pooling_type=pooling)
        fixed = {"enforce_eager": True, "seed": 0, "disable_log_stats": False}
        self._llm = LLM(**(fixed | arguments))
        connector = self._core.scheduler.connector
        for each in getattr(connector, "_connectors", [connector]):
            manager = getattr(getattr(each, "connector_scheduler", None), "manager", None)
            if adapters := getattr(manager, "_adapters", None):
                adapters._look_wait_s = SETTLE_S  # files may be read slowly
        return {"pid": os.getpid()}

    # -- requests

    def generate(
        self, prompts: list[list[int]], tokens: int = 16, more: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Greedy continuations, all prompts at once; `more` holds what else a prompt carries."""
        more = more or [{}] * len(prompts)
        adapters = [_adapter(extra.pop("adapter", None)) for extra in more]
        given = [
            {"prompt_token_ids": prompt, **_seen(extra)}
            for prompt, extra in zip(prompts, more, strict=True)
        ]
        found = self._llm.generate(
            given, self._greedy(tokens), use_tqdm=False, lora_request=adapters
        )
        return [_shown(each) for each in found]

    def generate_with(self, prompt: list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
        """One continuation with an adapter, a priority, limits or a pattern to follow."""
        parameters = self._greedy(tokens, more.get("limits"))
        named: dict[str, Any] = {}
        if "adapter" in more:
            named["lora_request"] = _adapter(more["adapter"])
        if "priority" in more:
            named["priority"] = [more["priority"]]
        if "regex" in more:
            from vllm.sampling_params import StructuredOutputsParams

            parameters.structured_outputs = StructuredOutputsParams(regex=more["regex"])
            parameters.ignore_eos = False
        found = self._llm.generate(
            [{"prompt_token_ids": prompt}], parameters, use_tqdm=False, **named
        )
        return _shown(found[0])

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """What stands for each prompt as a whole."""
        found = self._llm.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
        return [each.outputs.embedding for each in found]

    def begin(
        self,
        prompt: list[int],
        tokens: int,
        limits: dict[str, Any] | None = None,
        steps: int = 3,
        adapter: tuple[str, int, str] | None = None,
        hints: list[tuple[str, dict[str, Any]]] | None = None,
    ) -> str:
        """Send a request, perhaps with hints, and step until what it loads is under way; its
        name."""
        engine = self._llm.llm_engine
        self._serial += 1
        given, parameters = {"prompt_token_ids": prompt}, self._greedy(tokens, limits)
        name, tuned = f"begun-{self._serial}", _adapter(adapter)
        more = {} if hints is None else {"kv_hints": _envelope(hints)}
        engine.add_request(name, given, parameters, lora_request=tuned, **more)
        for _ in range(steps):
            self._note_ended(engine.step())
        return name

    def converse(
        self,
        pieces: list[list[int]],
        tokens: int,
        steps: int = 0,
        more: list[dict[str, Any]] | None = None,
        only: int | None = None,
    ) -> list[int]:
        """A session, to whose input more is added after each answer; all its tokens in the end.
        Its name is always the same; when it has ended, the engine goes on for so many steps. It
        says `only` this token, if there is one."""
        engine = self._llm.llm_engine
        tasks = engine.get_supported_tasks()
        said: list[int] = []
        for piece, extra in zip(pieces, more or [{}] * len(pieces), strict=True):
            given = {"prompt_token_ids": piece, **_seen(extra)}
            parameters = self._greedy(tokens)
            parameters.allowed_token_ids = None if only is None else [only]
            request = engine.input_processor.process_inputs(
                "session", given, parameters, supported_tasks=tasks, resumable=True
            )
            engine.engine_core.add_request(request)
            answer: list[int] = []
            while len(answer) < tokens:
                for output in engine.engine_core.get_output().outputs:
                    answer += output.new_token_ids
            said += piece + answer[:-1]  # the last one has not been computed, and is dropped
        engine.engine_core.abort_requests(["session"])
        for _ in range(steps):
            self._step()
        return said

    def abort(self) -> None:
        """Abort the request that was begun last."""
        self._llm.llm_engine.abort_request([f"begun-{self._serial}"])
        self._step()

    def fail(self, prompt: list[int]) -> None:
        """Begin a request that fails when a part of its prompt is computed."""
        from vllm.v1.request import RequestStatus

        engine = self._llm.llm_engine
        engine.add_request("failed", {"prompt_token_ids": prompt}, self._greedy(1))
        scheduler = self._core.scheduler
        while not any(each.num_computed_tokens for each in scheduler.running):
            engine.step()
        named = [each.request_id for each in scheduler.running]
        scheduler.finish_requests(named, RequestStatus.FINISHED_ERROR)
        engine.abort_request(["failed"])
        self._step()

    def wait_for_others(self, patience: float) -> None:
        """How long blocks are waited for that another engine has computed, and for media to say
        what they have."""
        import kvtier.vllm.deferrals

        kvtier.vllm.deferrals.WAIT_S = kvtier.vllm.deferrals.QUERY_WAIT_S = patience

    def end(self, of: str | None = None) -> dict[str, Any]:
        """Step until one of the requests that were begun has ended, or this one."""
        engine = self._llm.llm_engine
        while not self._ended if of is None else of not in self._ended:
            outputs = engine.step()
            self._note_ended(outputs)
            if not outputs:
                time.sleep(0.001)  # as vLLM's own process does while all requests wait
        return self._ended.pop(of or next(iter(self._ended)))

    def _note_ended(self, outputs: list[Any]) -> None:
        self._ended |= {each.request_id: _shown(each) for each in outputs if each.finished}

    def ignored_hints(self) -> dict[str, int]:
        """How many hints were not understood, by why."""
        return dict(self._manager.hints.ignored)

    def shut_down(self) -> None:
        """As a server's engine ends that is told to."""
        self._llm.llm_engine.engine_core.shutdown()

    def storm(self, **arguments: Any) -> dict[str, Any]:
        """Many requests at once, some of them aborted."""
        from storm import storm

        return storm(self._llm.llm_engine, self._greedy, self._step, **arguments)

    def besieged(self, **arguments: Any) -> dict[str, Any]:
        """Honest requests in a storm of hostile ones, all of which are aborted."""
        from storm import besieged

        return besieged(self._llm.llm_engine, self._greedy, **arguments)

    def _greedy(self, tokens: int, limits: dict[str, Any] | None = None) -> Any:
        from vllm import SamplingParams

        more = {"kv_transfer_params": limits}
        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=more)

    # -- sleep, and other weights

    def sleep(self, level: int) -> int:
        """Sleep; answers with how many blocks were still copied after that had returned."""
        self._llm.sleep(level=level)
        before = self._copied
        copies = self._connector_worker.worker
        copies.wait(set(copies._numbers))
        return self._copied - before

    def wake_up(self) -> bool:
        """Go on; answers whether it does."""
        self._llm.wake_up()
        return not self._core.is_sleeping()

    def pause(self) -> bool:
        """Take no new requests; answers whether vLLM still waits when nothing is copied."""
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self._step()  # what has ended is stored in the next one
        while self._manager._pending:
            self._step()
        return bool(self._core.scheduler.has_requests())

    def resume(self) -> bool:
        """Go on; answers whether there is something to do."""
        self._core.resume_scheduler()
        return bool(self._core.scheduler.has_requests())

    def spoil_device(self) -> None:
        """What a GPU's memory is after a sleep; the CPU platform keeps its own."""
        for cache in self._core.model_executor.driver_worker.model_runner.kv_caches:
            cache.fill_(1000.0)

    def take_adapter(self, adapter: tuple[str, int, str], in_place: bool = False) -> bool:
        """Read an adapter, as a server does before there are requests for it."""
        taken = _adapter(adapter)
        taken.load_inplace = in_place
        return bool(self._llm.llm_engine.add_lora(taken))

    def take_weights(self, folder: str) -> None:
        """Read other weights into the running engine."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    # -- the engine and its caches

    @property
    def _connector_worker(self) -> Any:
        """The worker's side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def _connector_scheduler(self) -> Any:
        connector = self._core.scheduler.connector
        connector = getattr(connector, "_connectors", [connector])[self._which]
        return connector.connector_scheduler

    @property
    def _vllm_manager(self) -> Any:
        return self._connector_scheduler.manager

    @property
    def _manager(self) -> Any:
        return self._vllm_manager._manager

    def _step(self) -> None:
        self._core.step_fn()

    def forget_engine_cache(self) -> bool:
        """Empty vLLM's own prefix cache."""
        self.settle()
        return bool(self._llm.reset_prefix_cache())

    def forget_everything(self) -> bool:
        """What vLLM does when its weights may have changed."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def preempt_all(self) -> bool:
        """Empty vLLM's own prefix cache though requests are running: they begin anew."""
        return bool(self._llm.reset_prefix_cache(reset_running_requests=True))

    def settle(self) -> bool:
        """Let the engine step until nothing is under way."""
        manager = self._manager
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            self._step()
            if not manager.has_pending_work:
                return True
            time.sleep(0.002)
        return False

    def look_around(self) -> None:
        """Learn now what other engines have stored and dropped."""
        for tier in self._manager.chain.tiers:
            tier.refresh()

    def mover(self) -> int:
        """The process of the mover; waits for it if it is being started."""
        end = time.monotonic() + SETTLE_S
        while (found := self._manager.stack.mover.pid) is None:
            if time.monotonic() > end:
                raise TimeoutError("no mover")
            self._step()
            time.sleep(0.01)
        return int(found)

    def look_at(self, connector: int) -> None:
        """From now on commands are about this one of several connectors."""
        self._which = connector

    def clear(self, tier: int) -> None:
        """Forget all that one tier holds."""
        self._manager.chain.tiers[tier].clear()
        self._vllm_manager._meter.due = True  # else there is nothing to do, and no step
        self._vllm_manager._next_poll = 0.0  # nor is it looked for events, for some milliseconds
        self._step()

    def looks(self, steps: int) -> int:
        """How often a request is looked up in so many steps."""
        manager, looked = self._manager, 0
        look_up = manager._look_up

        def counted(state: Any) -> Any:
            nonlocal looked
            looked += 1
            return look_up(state)

        manager._look_up = counted
        for _ in range(steps):
            self._step()
        manager._look_up = look_up
        return looked

    def load_no_probes(self) -> None:
        """Load nothing more to see how long it takes."""
        for link in self._manager.costs._links.values():
            link.next_probe = float("inf")

    def record_crowds(self) -> None:
        """Note how many wait behind each request that the engine asks about, from now on; and load
        no probes: what is given up is asked about again."""
        self._crowds: list[int] = []
        self.load_no_probes()
        costs = self._manager.costs
        observe = costs.observe_waiting

        def note(requests: int) -> None:
            self._crowds.append(requests)
            observe(requests)

        costs.observe_waiting = note

    def crowds(self) -> list[int]:
        """What was noted."""
        return self._crowds

    def forget_speeds(self) -> None:
        """Take tiers to be as fast as they are held to be before anything was loaded."""
        self._manager.costs._links.clear()

    def costs(self) -> dict[str, Any]:
        """What the cost model knows of each link, and of a prompt of 1000 tokens."""
        import msgspec

        costs = self._manager.costs
        links = {name: msgspec.to_builtins(link) for name, link in costs.stats().items()}
        return links | {"prefill_seconds": costs.recompute_seconds(0, 1000)}

    def record_events(self) -> None:
        """Keep what is published from now on."""
        import msgspec

        self._events: list[dict[str, Any]] = []

        def publish(batch: Any) -> None:
            for each in batch.events:
                told = msgspec.to_builtins(msgspec.structs.asdict(each))
                self._events.append({"kind": type(each).__name__, **told})

        self._core.scheduler.kv_event_publisher.publish = publish

    def events(self) -> list[dict[str, Any]]:
        """What was published."""
        self._step()
        return self._events

    def described(self) -> int:
        """Of how many blocks the content is kept, to be told."""
        return len(self._connector_scheduler._events_tracker)

    def loaded_bytes(self, tokens: int) -> int:
        """The payload of so many tokens' blocks."""
        manager = self._manager
        return int(tokens // manager.shapes[0].tokens * sum(manager.stack.namespace.group_bytes))

    def sources(self) -> dict[str, float]:
        """The cached tokens that vLLM has counted, by where it was told that they came from."""
        name = "vllm:prompt_tokens_cached_by_source"
        found = {m.labels["source"]: m.value for m in self._llm.get_metrics() if m.name == name}
        return {source: value for source, value in found.items() if value}

    def counted(self, counter: str) -> float:
        """One of our counters as Prometheus has it now, over all its labels."""
        from prometheus_client import REGISTRY

        samples = [each for metric in REGISTRY.collect() for each in metric.samples]
        return sum(each.value for each in samples if each.name == counter)

    def resident(self) -> int:
        """The bytes of memory that are this process's own, without what it has freed."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    def facts(self) -> dict[str, Any]:
        """What the counters say, and what is still held."""
        import msgspec

        from kvtier import guard

        manager = self._manager
        return {
            "chain": msgspec.to_builtins(manager.chain.chain_stats()),
            "failed_loads": manager.failed_loads,
            "late_loads": manager.late_loads,
            "failed_stores": manager.failed_stores,
            "pending": len(manager._pending),
            "requests": len(manager._requests),
            "busy": manager.has_pending_work,
            "mistakes": guard.caught,
            "descriptors": min(map(_open_files, range(20))),
            "region": manager._region,
            "namespace": dict(manager.stack.namespace.facts),
            "chunk_tokens": max(shape.tokens for shape in manager.shapes.values()),
            "free_blocks": self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


def _open_files(turn: int) -> int:
    """How many there are now: threads open some for a moment."""
    time.sleep(0.005 if turn else 0.0)
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _go_easy_on_processors() -> None:
    """On a CPU vLLM starts the workers of several ranks anew, and most of that is importing. After
    each step they yield for a second in a tight loop, which can keep other processes waiting for
    half a minute where there are few processors (Linux 6.18)."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)


def _adapter(named: tuple[str, int, str] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(*named) if named else None


def _envelope(hints: list[tuple[str, dict[str, Any]]]) -> Any:
    """Hints as a router sends them, from 0.32 on."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    actions = [KvHintAction(str(n), kind, "1.0", said) for n, (kind, said) in enumerate(hints)]
    return KvHintsEnvelope("0.1", "test", actions)


def _seen(extra: dict[str, Any]) -> dict[str, Any]:
    """What a prompt carries, with an image of noise where a number stands for one; or with what a
    model has made of an image elsewhere, so many tokens of such a width."""
    if "embeddings" in extra:
        import torch

        return {"multi_modal_data": {"image": torch.zeros(1, *extra["embeddings"])}}
    if "image" not in extra:
        return extra
    from PIL import Image

    noise = random.Random(extra["image"]).randbytes(64 * 64 * 3)
    return {"multi_modal_data": {"image": Image.frombytes("RGB", (64, 64), noise)}}


def _shown(output: Any) -> dict[str, Any]:
    shown = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0}
    if output.kv_transfer_params:
        shown["transfer"] = output.kv_transfer_params
    return shown


def main(kind: type[Host] = Host) -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")
    host = kind()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        command: Callable[..., Any] = getattr(host, name)
        try:
            answer = {"value": command(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
