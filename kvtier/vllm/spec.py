"""What vLLM builds in its scheduler and in every worker: its words around ours.

The methods of these classes are the border that no exception of kvtier may cross: each is guarded,
and what goes wrong behind it is a miss or a store that did not happen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvtier import config as stack_config
from kvtier.chain.hits import Shape
from kvtier.cost.model import CostModel
from kvtier.device.pacing import EngineSteps
from kvtier.errors import ConfigError
from kvtier.interfaces.backend import backend
from kvtier.interfaces.handler import RegionHandler
from kvtier.stack import Stack
from kvtier.system import numa
from kvtier.types import BlockKey
from kvtier.vllm.engine_load import prompt_tokens
from kvtier.vllm.events import events_of
from kvtier.vllm.guard import guarded
from kvtier.vllm.hooks import interfaces
from kvtier.vllm.hooks.cache_groups import ranks_alike
from kvtier.vllm.hooks.failure_tolerant_worker import ErrandSpec
from kvtier.vllm.hooks.request_states import positions
from kvtier.vllm.identity.lora_adapters import Adapters
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.metrics import Meter, definitions
from kvtier.vllm.protocol import NO_SLOT, Errand, Geometry, Report
from kvtier.vllm.settings import read_engine, read_namespace, read_stack
from kvtier.vllm.worker import EndedJob, RankShare, RankWorker, blocks_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_NEWS_S = 0.02
"""How old news of the tiers' keepers may be while nothing is asked of the tiers, and nothing moves:
as old as it is when they bring it."""
Holes = Callable[[Collection[bytes], Any], set[bytes]]
"""Tells which of these chunks of a request are not whole."""


class KVTierSpec(interfaces.OffloadingSpec):  # type: ignore[misc]
    """Opens the stack for the scheduler, and a rank's copies for a worker."""

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        return definitions(extra_config)

    def get_manager(self) -> Any:
        config = self.config
        stack = read_stack(self.extra_config)
        if not backend(stack.tiers[0].kind).mapped:
            raise ConfigError(
                "$.tiers[0].kind",
                f"is {stack.tiers[0].kind}, which the engine's workers cannot reach",
                "put a tier of kind cpu first",
            )
        namespace = read_namespace(self.extra_config)
        index = config.parallel.data_parallel_index
        # Of a dense model each rank is told that there is no other; its index it keeps.
        shared = config.parallel.data_parallel_size > 1 or index > 0
        ranks = config.parallel.world_size
        costs = CostModel() if stack.loads is stack_config.Loads.WORTHWHILE else None
        opened = Stack.open(
            self.extra_config["stack"],
            namespace,
            serving=True,
            costs=costs,
            engine=f"{stack.name}-dp{index}" if shared else None,
            near=self._near,
        )
        assert isinstance(opened.host, RegionHandler)
        opened.host.region.name_engine(self._engine)
        logger.info("KV cache is kept, and found again: %s", opened.summary())
        manager = ChainManager(
            opened,
            region=str(opened.host.region.path),
            ranks=ranks,
            costs=costs,
        )
        keeps = stack.sleep is stack_config.Sleep.KEEP
        return VllmManager(manager, events=config.enable_kv_cache_events, keeps=keeps)

    def get_worker(self, kv_caches: Any) -> Any:
        config = self.config
        stack = read_stack(self.extra_config)
        kind, (_, alone) = backend(stack.tiers[0].kind), read_engine(self.extra_config)
        if alone and kv_caches.tensors[0].tensor.is_cuda:  # the scheduler needs it in a moment
            kind.begin_memory(stack.tiers[0], self._near)
        return VllmWorker(
            RankWorker(
                kv_caches,
                RankShare(
                    rank=config.parallel.rank,
                    ranks=config.parallel.world_size,
                    blocks_per_chunk=self.blocks_per_chunk,
                    group_ids=tuple(group.group_id for group in config.groups),
                    alike=ranks_alike(config),
                    pipelined=config.parallel.pp_size > 1,
                ),
                gds=stack.gds,
                folders=stack_config.folders(stack),
                attach=kind.attach,
                find_region=partial(kind.find_region, stack.tiers[0], self._engine),
            )
        )

    @property
    def _engine(self) -> str:
        """What its scheduler and its workers call it, and no other engine of this machine."""
        index = self.config.parallel.data_parallel_index
        return f"{read_engine(self.extra_config)[0]}/{index}"

    @property
    def _near(self) -> tuple[int, ...]:
        """The nodes of its GPUs."""
        index, ranks = self.config.parallel.data_parallel_index, self.config.parallel.world_size
        return numa.Topology().near(index * ranks, ranks, os.environ)


def _passed_on(
    method: Callable[Concatenate[T, P], R],
    instead: Callable[[], Any] = lambda: None,
    *,
    to: str = "_manager",
) -> Callable[Concatenate[Any, P], R]:
    """A method of our manager or worker, for a caller who has vLLM's: guarded, else the same."""

    @guarded(instead)
    @functools.wraps(method)
    def passed_on(self: Any, /, *arguments: P.args, **named: P.kwargs) -> R:
        # Found by its name, not called directly: tests put others in its place.
        answer: R = getattr(getattr(self, to), method.__name__)(*arguments, **named)
        return answer

    return passed_on


class VllmManager(interfaces.OffloadingManager):  # type: ignore[misc]
    """vLLM's manager: asks ours, and answers in vLLM's words."""

    def __init__(self, manager: ChainManager, *, events: bool, keeps: bool) -> None:
        self._manager, self.ahead, self.hints = manager, manager.ahead, manager.hints
        self._meter = Meter(manager)
        self._events = events
        self._keeps, self._pauses = keeps, False
        self.adapters = Adapters()
        self._unkept = set[str]()
        """Requests that are about to be added, and whose keys do not tell enough."""
        self._unidentified = set[str]()
        """Requests with adapters whose files are being looked at."""
        self._next_poll = 0.0
        self.has_events = False
        """Whether something may have changed in the tiers since their events were taken."""
        self._with_holes: Holes = lambda _keys, _context: set()

    def keep(self, shapes: Mapping[int, Shape], with_holes: Holes) -> None:
        """Say which cache groups there are, and which chunks of a request are not whole."""
        self._manager.shapes = shapes
        self._with_holes = with_holes

    # -- what vLLM does not ask, and our connector does

    asks = _passed_on(ChainManager.asks)
    expect = _passed_on(ChainManager.expect)
    hands_over = _passed_on(ChainManager.hands_over, lambda: False)
    still_waits = _passed_on(ChainManager.still_waits, lambda: False)
    put_off = _passed_on(ChainManager.put_off)
    scheduled = _passed_on(ChainManager.scheduled)
    uses = _passed_on(ChainManager.uses)
    junction = _passed_on(ChainManager.junction, lambda: 0)
    keep_no_more = _passed_on(ChainManager.keep_no_more)
    distrust_stores = _passed_on(ChainManager.distrust_stores)
    tell_now = _passed_on(Meter.tell_now, to="_meter")

    # -- loads

    @guarded(lambda: interfaces.LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._manager.lookup(key, req_context.req_id, positions(req_context))
        if found is None:
            return interfaces.LookupResult.RETRY
        return interfaces.LookupResult.HIT if found else interfaces.LookupResult.MISS

    @guarded(lambda: interfaces.CacheHitSource.EXTERNAL_UNSPECIFIED)
    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        tier = self._manager.source_of(key, req_context.req_id)
        sources = interfaces.CacheHitSource
        if self._manager.chain.tiers[tier].medium == "object":
            return sources.EXTERNAL_UNSPECIFIED
        return sources.HOST if tier == 0 else sources.DISK

    _prepare_load = _passed_on(ChainManager.prepare_load)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        errand = self._prepare_load(keys, req_context.req_id) or _hopeless(keys)
        return ErrandSpec(errand)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """The workers' reports have ended the load already, one way or the other."""

    # -- stores

    @guarded(lambda: interfaces.PrepareStoreOutput([], None, []))
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        self.has_events = True
        holes = self._with_holes(keys, req_context)
        whole = [key for key in keys if key not in holes]
        taken, errand = self._manager.prepare_store(whole, req_context.req_id)
        if taken:
            self.adapters.stores(req_context.req_id, errand.number)
        return interfaces.PrepareStoreOutput(
            keys_to_store=taken, store_spec=ErrandSpec(errand), evicted_keys=[]
        )

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """The workers' reports have committed the store already, or aborted it."""

    # -- steps

    @guarded(lambda: None)
    def step_began(self, scheduled: Any) -> int | None:
        """The engine goes to work on this; an errand of a load that it had better not wait for."""
        self._manager.step_began(*prompt_tokens(scheduled), scheduled.num_scheduled_tokens)
        return self._manager.give_up() if self._manager.copying else None

    @guarded(lambda: None)
    def step_ended(self) -> None:
        """The oldest step that began has ended."""
        self._manager.load.pace.ended()

    @guarded(lambda: None)
    def report(self, number: int, report: Report) -> str | None:
        """What ranks say of an errand; names the request if its load has now failed."""
        self._meter.reported(report)
        self.has_events = True
        if self.adapters.holds(number, report):
            return None
        return self._manager.report(number, report)

    @guarded(lambda: None)
    def mistook(self, mistakes: int) -> None:
        """So many exceptions were caught in workers."""
        self._meter.mistook(mistakes)

    # -- the life of requests and of the engine

    @guarded(interfaces.RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> Any:
        request = req_context.req_id
        kept, identified = request not in self._unkept, request not in self._unidentified
        self._unkept.discard(request)
        self._manager.on_new_request(request, b"" if kept else None, identified=identified)
        return interfaces.RequestOffloadingContext()

    @guarded(lambda: None)
    def remember_adapter(self, request: str, adapter: Any) -> None:
        """vLLM's hashes know an adapter by name and path only: its bytes belong in the keys."""
        if adapter is not None:
            self.keep_nothing(request)
            self.adapters.arrived(request, adapter)
            self._unkept.discard(request)
            self._unidentified.add(request)

    def keep_nothing(self, request: str) -> None:
        """The keys of a request that is about to be added do not tell enough."""
        self._unkept.add(request)
        self._unidentified.discard(request)

    @guarded(lambda: False)
    def awaits_adapter(self, request: str) -> bool:
        """Whether it has to wait for a look at its adapter's files: the engine is to read them
        after that."""
        if request not in self._unidentified:
            return False
        if self.adapters.awaits(request):
            return True
        self._unidentified.discard(request)
        self._manager.identify(request, self.adapters.take_salt(request))
        return False

    @guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        self._unidentified.discard(req_context.req_id)
        self.adapters.ended(req_context.req_id)
        self._manager.on_request_finished(req_context.req_id)

    @guarded(lambda: None)
    def on_schedule_end(self, context: Any = None) -> None:
        for request in list(self._unidentified):  # what it will ask for may be prefetched then
            self.awaits_adapter(request)
        for number, report, vouched in self.adapters.take_stored():
            if not vouched:
                self._manager.distrust_stores()
            self._manager.report(number, report)
            self.has_events = True
        now = time.monotonic()
        if now >= self._next_poll or self._manager.ahead.due or not self._manager.chain.at_rest:
            self._next_poll, self.has_events = now + _NEWS_S, True
            self._manager.on_schedule_end()

    @guarded(lambda: False)
    def copying(self) -> bool:
        """Whether workers still copy from or to the device."""
        return self._manager.copying

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work or self._meter.due

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """A reset within this is for a pause, and what is stored may be kept."""
        self._pauses = True
        try:
            yield
        finally:
            self._pauses = False

    @guarded(lambda: None)
    def reset_cache(self) -> None:
        self.has_events = True
        self._manager.reset(keep=self._keeps and self._pauses)

    @guarded(list)
    def take_events(self) -> Iterable[Any]:
        self.has_events = False
        events = self._manager.chain.take_events()
        return events_of(events) if self._events else []

    def known_as(self, key: bytes, request: str) -> BlockKey:
        """The key by which the tiers, and their events, know this one of a request's."""
        return self._manager.known_as(key, request)

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        return self._meter.read()

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self.adapters.close()
        self._manager.close()


class VllmWorker(interfaces.OffloadingWorker):  # type: ignore[misc]
    """vLLM's worker: whatever happens, every job ends and is reported."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        self._mark: object = None

    give_up = _passed_on(RankWorker.give_up, to="_worker")
    release_blocks = _passed_on(RankWorker.release_blocks, to="_worker")
    wait = _passed_on(RankWorker.wait, to="_worker")
    make_ready = _passed_on(RankWorker.make_ready, to="_worker")

    @property
    def steps(self) -> EngineSteps:
        """To be told of the engine's steps."""
        return self._worker.steps

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        if not self._submit(self._worker.store, job_id, dst_spec.errand, src_spec):
            self._worker.abandon(job_id, dst_spec.errand)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        load = partial(self._worker.load, mark=self._mark)
        if not self._submit(load, job_id, src_spec.errand, dst_spec):
            self._worker.abandon(job_id, src_spec.errand)
        return True

    @guarded(lambda: False)
    def _submit(self, move: Any, job_id: int, errand: Errand, device: Any) -> bool:
        move(job_id, errand, blocks_of(device))
        return True

    @guarded(lambda: None)
    def begin_step(self) -> None:
        """The engine is about to compute; the loads that begin until `end_step` need not wait for
        that."""
        self._mark = None
        self._mark = self._worker.mark()

    def end_step(self) -> None:
        """What begins from now on comes after all that the engine has given its device to do."""
        self._mark = None

    @guarded(list)
    def take_ended(self) -> list[EndedJob]:
        """Jobs that ended since the last call, with what became of their errands."""
        return self._worker.poll()

    def get_finished(self) -> list[Any]:
        """As vLLM's own worker class would ask; ours asks `take_ended`."""
        return [
            interfaces.TransferResult(
                ended.job_id, ended.ok, ended.report.bytes_moved, ended.seconds
            )
            for ended in self.take_ended()
        ]

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self._worker.close()


def _hopeless(keys: Collection[bytes]) -> Errand:
    """A load that fails on the worker: `prepare_load` cannot refuse."""
    known = [BlockKey(key) for key in keys]
    return Errand(0, "", Geometry(b"", (), 1), known, [NO_SLOT] * len(known), 0.0)
