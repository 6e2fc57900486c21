"""What vLLM builds in its scheduler and in every worker, in vLLM's words.

No exception of kvtier crosses the methods of these classes: each is guarded, and what goes wrong
behind it is a miss or a store that did not happen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvtier import config as stack_config
from kvtier.chain.hits import Shape
from kvtier.cost.model import CostModel
from kvtier.device.layout import HeadShape
from kvtier.errors import KVTierError
from kvtier.guard import guarded, never_raising
from kvtier.interfaces.backend import backend
from kvtier.interfaces.handler import RegionHandler
from kvtier.stack import Stack
from kvtier.system.memory import Topology
from kvtier.types import BlockKey, Presence, TierEvent
from kvtier.vllm.engine_load import prompt_tokens
from kvtier.vllm.hooks import interfaces
from kvtier.vllm.hooks.scheduler import key_positions
from kvtier.vllm.hooks.worker import WorkerJobSpec
from kvtier.vllm.identity.lora_adapters import Adapters
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.metrics import Meter, definitions
from kvtier.vllm.miss_socket import MissSocket
from kvtier.vllm.protocol import Report, WorkerJob
from kvtier.vllm.settings import (
    check_first_tier,
    engine_name,
    read_copies,
    read_engine,
    read_namespace,
    read_stack,
)
from kvtier.vllm.worker import RankShare, RankWorker

logger = logging.getLogger(__name__)

_NEWS_S = 0.02
"""How old news of the tiers' keepers may be while nothing is asked of the tiers, and nothing moves:
as old as it is when they bring it."""
Incomplete = Callable[[Collection[bytes], Any], set[bytes]]
"""Tells which of these chunks of a request are not complete."""


class KVTierSpec(interfaces.OffloadingSpec):  # type: ignore[misc]
    """Opens the stack for the scheduler, and a rank's copies for a worker."""

    heads: Sequence[Sequence[HeadShape]] = ()
    """Of a worker's KV tensors, by cache group and layer, if it loads what other numbers of ranks
    have written."""

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        return definitions(extra_config)

    def get_manager(self) -> Any:
        config = self.config
        stack = read_stack(self.extra_config)
        check_first_tier(stack)
        namespace = read_namespace(self.extra_config)
        ranks = config.parallel.world_size
        parts = ranks // read_copies(self.extra_config)
        costs = CostModel() if stack.load_policy is stack_config.LoadPolicy.COST_MODEL else None
        opened = Stack.open(
            stack,
            namespace,
            serving=True,
            costs=costs,
            engine=engine_name(stack, config.parallel),
            near=self._near,
            ranks=ranks,
        )
        assert isinstance(opened.host, RegionHandler)
        opened.host.region.name_engine(self._engine)
        logger.info("KV cache is kept, and found again: %s", opened.summary())
        manager = ChainManager(
            opened,
            region=str(opened.host.region.path),
            ranks=ranks,
            parts=parts,
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
        return RankWorker(
            kv_caches,
            RankShare(
                rank=config.parallel.rank,
                ranks=config.parallel.world_size,
                blocks_per_chunk=self.blocks_per_chunk,
                group_ids=tuple(group.group_id for group in config.groups),
                copies=read_copies(self.extra_config),
                pipelined=config.parallel.pp_size > 1,
                heads=self.heads,
            ),
            gds=stack.gds,
            folders=stack_config.folders(stack),
            attach=kind.attach,
            find_region=partial(kind.find_region, stack.tiers[0], self._engine),
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
        return Topology().near(index * ranks, ranks, os.environ)


class VllmManager(interfaces.OffloadingManager):  # type: ignore[misc]
    """vLLM's manager: asks the chain's, and answers in vLLM's words."""

    def __init__(self, manager: ChainManager, *, events: bool, keeps: bool) -> None:
        self._manager, self.ahead, self.hints = manager, manager.ahead, manager.hints
        self.prefetches, self.queries = manager.chain.prefetches, manager.chain.queries
        self._meter, self._adapters = Meter(manager), Adapters()
        # For what vLLM does not ask, and kvtier's connector does:
        self.chain_manager, self.load = never_raising(manager), never_raising(manager.load)
        self.meter, self.adapters = never_raising(self._meter), never_raising(self._adapters)
        # For the description of events:
        self.known_as, self.media = manager.known_as, [tier.medium for tier in manager.chain.tiers]
        self._events = events
        self._keeps, self._pauses = keeps, False
        self._unkept = set[str]()
        """Requests that are about to be added, and whose keys do not tell enough."""
        self._unidentified = set[str]()
        """Requests with adapters whose files are being looked at."""
        self._next_poll = 0.0
        self._miss_socket = _explain_misses(manager)
        self.has_events = False
        """Whether something may have changed in the tiers since their events were taken."""
        self._incomplete: Incomplete = lambda _keys, _context: set()

    def keep(self, shapes: Mapping[int, Shape], incomplete: Incomplete) -> None:
        """State which cache groups there are, and which chunks of a request are not complete."""
        self._manager.shapes = shapes
        self._incomplete = incomplete

    # -- loads

    @guarded(lambda: interfaces.LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._manager.lookup(key, req_context.req_id, key_positions(req_context))
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

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        # It cannot refuse: a load without a worker job of its own fails on the worker.
        worker_job = self.chain_manager.prepare_load(keys, req_context.req_id)
        return WorkerJobSpec(worker_job or WorkerJob.without_slots(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """The workers' reports have ended the load already, one way or the other."""

    # -- stores

    @guarded(lambda: interfaces.PrepareStoreOutput([], None, []))
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        self.has_events = True
        self._meter.asked_for_room(len(keys))
        incomplete = self._incomplete(keys, req_context)
        complete = [key for key in keys if key not in incomplete]
        taken, worker_job = self._manager.prepare_store(complete, req_context.req_id)
        if taken:
            self._adapters.stores(req_context.req_id, worker_job.number)
        return interfaces.PrepareStoreOutput(
            keys_to_store=taken, store_spec=WorkerJobSpec(worker_job), evicted_keys=[]
        )

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """The workers' reports have committed the store already, or aborted it."""

    # -- steps

    @guarded(lambda: None)
    def step_began(self, scheduled: Any) -> int | None:
        """The engine goes to work on this; the job of a load that it had better not wait for."""
        self._manager.step_began(*prompt_tokens(scheduled), scheduled.num_scheduled_tokens)
        return self._manager.give_up() if self._manager.copying else None

    @guarded(lambda: None)
    def report(self, number: int, report: Report) -> str | None:
        """What ranks say of a worker job; names the request if its load has now failed."""
        self._meter.reported(report)
        self.has_events = True
        if self._adapters.holds(number, report):
            return None
        return self._manager.report(number, report)

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
        self.keep_nothing(request)
        self._adapters.arrived(request, adapter)
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
        if self._adapters.awaits(request):
            return True
        self._unidentified.discard(request)
        self._manager.identify(request, self._adapters.take_salt(request))
        return False

    @guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        self._unidentified.discard(req_context.req_id)
        self._adapters.ended(req_context.req_id)
        self._manager.on_request_finished(req_context.req_id)

    @guarded(lambda: None)
    def on_schedule_end(self, context: Any = None) -> None:
        for request in tuple(self._unidentified):  # what it will ask for may be prefetched then
            self.awaits_adapter(request)
        for number, report, vouched in self._adapters.take_stored():
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
    def take_events(self) -> Iterable[tuple[int, TierEvent]]:
        # Not vLLM's own: they pass `DescribedEvents`, which makes them so.
        self.has_events = False
        tiers = self._manager.chain.tiers
        events = [(at, each) for at, tier in enumerate(tiers) for each in tier.take_events()]
        return events if self._events else []

    def holders(self, key: BlockKey) -> list[int]:
        """The tiers that have this block now, by their numbers."""
        tiers = enumerate(self._manager.chain.tiers)
        return [at for at, tier in tiers if tier.lookup([key]) == [Presence.HIT]]

    @guarded(lambda: None)
    def get_stats(self) -> Any:
        return self._meter.read()

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self._adapters.close()
        if self._miss_socket is not None:
            self._miss_socket.close()
        self._manager.close()


def _explain_misses(manager: ChainManager) -> MissSocket | None:
    """Be ready for who asks why a request missed; an engine goes on without."""
    if manager.misses is None:
        return None
    manager.other_namespaces.start()
    try:
        return MissSocket(manager.stack.config.name, manager.misses)
    except (KVTierError, OSError) as error:
        logger.warning("kvtier explain --request cannot ask this engine: %s", error)
        return None
