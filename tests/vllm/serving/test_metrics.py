"""The counters are told in time, and to the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.cost.model import CostModel
from kvtier.cost.rates import LoadRun
from kvtier.record.record import record_bytes
from kvtier.testing.subject import make_keys
from kvtier.types import Namespace
from kvtier.vllm.manager import ChainManager
from kvtier.vllm.protocol import Report

NAMESPACE = Namespace(facts={"model": "unit"}, group_bytes=(8192,))
SLOT = record_bytes(8192)
AS_VLLM = ("write_bytes", "chunk_queries", "chunk_hits")


def told(stats: Any) -> Mapping[Any, Any]:
    return {} if stats is None else dict(stats.data)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_what_happens_behind_the_last_request_is_told(tmp_path: Path) -> None:
    from kvtier.vllm.metrics import Meter

    now = [100.0]
    cpu = {"kind": "cpu", "path": str(tmp_path), "capacity": 64 * SLOT}
    nvme = {"kind": "nvme", "path": str(tmp_path / "nvme"), "capacity": 64 * SLOT, "free_floor": 0}
    config = {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu, nvme]}
    with Stack.open(config, NAMESPACE) as stack:
        manager = ChainManager(stack, region="region", ranks=1)
        manager.shapes = {0: Shape(256)}
        meter = Meter(manager, lambda: now[0])
        manager.on_new_request("a")
        assert meter.read() is not None
        _, worker_job = manager.prepare_store(list(make_keys(4)), "a")
        meter.reported(Report(1))
        manager.report(worker_job.number, Report(1))
        assert meter.read() is None, "too soon, while somebody asks"
        now[0] += 1
        assert "kvtier:stored_blocks" in str(told(meter.read()))
        assert meter.due, "it is on its way to the disk"
        manager.on_request_finished("a")
        end = time.monotonic() + 60
        while manager.has_pending_work:
            assert time.monotonic() < end
            manager.on_schedule_end()
        assert meter.due
        assert "nvme" in str(told(meter.read())), "at once, because nothing else is to be done"
        assert not meter.due
        assert stack.chain.tiers[1].stats().stored == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_mistakes_of_all_processes_are_told_once(tmp_path: Path) -> None:
    from kvtier import guard
    from kvtier.vllm.hooks.worker import WorkerJobMetadata
    from kvtier.vllm.metrics import Meter

    @guard.guarded(lambda: "instead")
    def mistaken() -> str:
        raise ValueError("of a test")

    cpu = {"kind": "cpu", "path": str(tmp_path), "capacity": 64 * SLOT}
    config = {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu]}
    with Stack.open(config, NAMESPACE) as stack:
        now = [100.0]
        meter = Meter(ChainManager(stack, region="region", ranks=1), lambda: now[0])
        guard.untold()
        assert meter.read().reduce()["kvtier:internal_errors"] == 0
        for told, ranks in ((1, ()), (3, (2,)), (3, (0,)), (7, (1, 2))):
            metas = [WorkerJobMetadata(mistakes=rank) for rank in ranks]
            for meta in metas[1:]:
                metas[0] = metas[0].aggregate(meta)
            now[0] += 1
            if metas:
                meter.mistook(metas[0].mistakes)
            if told in (1, 7):
                assert mistaken() == "instead"
            read = meter.read()
            assert meter._mistakes == told
            assert (read is not None) == (ranks != (0,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_what_the_cost_model_knows_and_leaves_is_told(tmp_path: Path) -> None:
    from kvtier.vllm.metrics import Meter

    cpu = {"kind": "cpu", "path": str(tmp_path), "capacity": 64 * SLOT}
    config = {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu]}
    with Stack.open(config, NAMESPACE) as stack:
        now = [100.0]
        costs = CostModel(clock=lambda: now[0])
        meter = Meter(ChainManager(stack, region="region", ranks=1, costs=costs), lambda: now[0])
        first = meter.read().reduce()
        assert first["kvtier:prefill_tokens_per_second"] == 0
        assert first["kvtier:internal_errors"] == first["kvtier:corrupt_blocks:('cpu',)"] == 0
        assert not [name for name in first if "link" in name], "nothing was measured"
        costs.observe_prefill(2048, 0.5)
        for _ in range(2):
            costs.observe_load("tape", 1 << 20, 8.0)
        assert costs.admit([LoadRun("tape", 4, 4 << 20)], 16) < 4
        now[0] += 1
        then = meter.read().reduce()
        assert then["kvtier:prefill_tokens_per_second"] == pytest.approx(4096)
        assert then["kvtier:hits_skipped_blocks:('tape',)"] == costs.stats()["tape"].refused
        assert then["kvtier:link_bytes_per_second:('tape',)"] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_tiers_of_one_kind_are_told_together(tmp_path: Path) -> None:
    from kvtier.vllm.metrics import Meter

    cpu = {"kind": "cpu", "path": str(tmp_path), "capacity": 64 * SLOT}
    disks = [
        {"kind": "nvme", "path": str(tmp_path / name), "capacity": size * SLOT, "free_floor": 0}
        for name, size in (("first", 64), ("second", 128))
    ]
    config = {"version": 1, "name": "unit", "mover": {"mode": "threads"}, "tiers": [cpu, *disks]}
    with Stack.open(config, NAMESPACE) as stack:
        now = [100.0]
        meter = Meter(ChainManager(stack, region="region", ranks=1), lambda: now[0])
        meter.read()
        stack.store({key: bytes(8192) for key in make_keys(4)})
        assert stack.settle()
        found = stack.chain.chain_stats()
        found.down, found.misses = [False, True, False], [4, 3, 1]
        stack.chain.chain_stats = lambda: found  # type: ignore[method-assign]
        now[0] += 1
        then = meter.read().reduce()
        assert then["kvtier:tier_down:('nvme',)"] == 1, "the other one is well"
        assert then["kvtier:miss_blocks:('nvme',)"] == 1, "what the second one had is no miss"
        assert then["kvtier:stored_blocks:('nvme',)"] == 8
        assert then["kvtier:written_bytes:('nvme',)"] == 8 * SLOT
        assert then["kvtier:blocks:('nvme',)"] == 8
        tiering = {name: then[f"vllm:kv_offload_tiering_{name}:('nvme',)"] for name in AS_VLLM}
        assert tiering == {"write_bytes": 8 * 8192, "chunk_queries": 4 + 3, "chunk_hits": 1 + 2}
        now[0] += 1
        again = meter.read()
        assert again is None or "nvme" not in str(again.reduce()), "nothing has changed"


_API_SERVERS = """
import os
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from kvtier.vllm import KVTierConnector
from kvtier.vllm.hooks import interfaces

def told(blocks):
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    metrics = KVTierConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    stats = interfaces.OffloadingConnectorStats()
    stats.set_gauge("kvtier:blocks", blocks, ("nvme",))
    stats.increase_counter("kvtier:stored_blocks", blocks, ("nvme",))
    metrics.observe(stats.data, 0)

for blocks in (12, 20):
    child = os.fork()
    if not child:
        told(blocks)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
registry = CollectorRegistry()
MultiProcessCollector(registry)
for line in generate_latest(registry).decode().splitlines():
    if line.startswith("kvtier:"):
        print(line)
"""


def test_of_several_api_servers_the_one_told_last_is_right(tmp_path: Path) -> None:
    """vLLM tells each of them something now and then; gauges would show what each has heard."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _API_SERVERS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        'kvtier:blocks{engine="0",tier="nvme"} 20.0',
        'kvtier:stored_blocks_total{engine="0",tier="nvme"} 32.0',
    ]
