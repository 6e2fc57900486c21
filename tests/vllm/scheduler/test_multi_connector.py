"""What the scheduler's side does where something beside it fails: another connector, or files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scheduler.asking import CHUNK, FULL, TWO_GROUPS, host_memory, manager

from kvtier import Stack
from kvtier.vllm.identity import lora_adapters
from kvtier.vllm.identity.lora_adapters import Adapters
from kvtier.vllm.protocol import Report


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_stores_of_adapters_are_forgotten_when_they_have_ended(tmp_path: Path) -> None:
    from kvtier.vllm import KVTierConnector
    from kvtier.vllm.hooks.worker import WorkerJobMetadata

    adapters, distrusted = Adapters(), list[bool]()
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = SimpleNamespace(lora_path=str(tmp_path), lora_int_id=1, load_inplace=False)
    adapters.arrived("a", adapter)
    connector: Any = KVTierConnector.__new__(KVTierConnector)
    connector.connector_scheduler = SimpleNamespace(update_connector_output=lambda _: None)
    connector._manager = SimpleNamespace(
        meter=SimpleNamespace(mistook=lambda _: None),
        chain_manager=SimpleNamespace(distrust_stores=lambda: distrusted.append(True)),
        report=lambda number, report: None if adapters.holds(number, report) else "",
    )
    for worker_job, invalid in enumerate([set(), {3}]):
        adapters.stores("a", worker_job)
        output = SimpleNamespace(
            kv_connector_worker_meta=WorkerJobMetadata(reports={worker_job: Report(1)}),
            invalid_block_ids=invalid,
            finished_recving=None,
        )
        connector.update_connector_output(output)
    assert distrusted == [True]
    assert adapters._storing == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_scheduler_waits_for_no_look_at_an_adapters_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is asked about again until the look has ended, and its store counts after another.
    The prompt is found by the next request with the adapter."""
    from kvtier.vllm.spec import VllmManager

    gate, plain = threading.Event(), lora_adapters.adapter_files
    monkeypatch.setattr(
        lora_adapters, "adapter_files", lambda of: plain(of) if gate.wait(60.0) else []
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = SimpleNamespace(lora_path=str(tmp_path), lora_int_id=1, load_inplace=False)
    with Stack.open(host_memory(tmp_path), TWO_GROUPS) as stack:
        asking = manager(stack, FULL)
        asked = VllmManager(asking.manager, events=False, keeps=False)
        asked._adapters = Adapters(look_wait_s=60.0)
        ends, context = asking.keys(2), SimpleNamespace(req_id="first")

        def step_while(waits: Callable[[], bool]) -> None:
            while waits():
                asked.on_schedule_end()

        asked.remember_adapter("first", adapter)
        asked.on_new_request(context)
        asked.on_schedule_end()
        assert asked.awaits_adapter("first")
        assert asked.prepare_store(list(ends), context).keys_to_store == []
        gate.set()
        step_while(partial(asked.awaits_adapter, "first"))
        gate.clear()
        worker_job = asked.prepare_store(list(ends), context).store_spec.worker_job
        asked.report(worker_job.number, Report(1))
        asked.on_schedule_end()
        assert asked.copying(), "it does not count yet"
        gate.set()
        step_while(asked.copying)
        for name, lora in (("second", adapter), ("plain", None)):
            if lora is not None:
                asked.remember_adapter(name, lora)
            asked.on_new_request(SimpleNamespace(req_id=name))
            step_while(partial(asked.awaits_adapter, name))
            assert asking.hit(name, ends, 2 * CHUNK) == (2 * CHUNK if lora else 0)
        asked._adapters.close()
