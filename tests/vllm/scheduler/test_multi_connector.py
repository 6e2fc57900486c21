"""What the scheduler's side does where another connector beside it fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.identity.weight_fingerprints import Adapters
from kvtier.vllm.protocol import Report


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
def test_stores_of_adapters_are_forgotten_when_they_have_ended(tmp_path: Path) -> None:
    from kvtier.vllm import KVTierConnector
    from kvtier.vllm.hooks.worker import ErrandMetadata

    adapters, distrusted = Adapters(), list[bool]()
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = SimpleNamespace(lora_path=str(tmp_path), lora_int_id=1, load_inplace=False)
    adapters.began("a", adapter)
    connector: Any = KVTierConnector.__new__(KVTierConnector)
    connector.connector_scheduler = SimpleNamespace(update_connector_output=lambda _: None)
    connector._manager = SimpleNamespace(
        meter=SimpleNamespace(mistook=lambda _: None),
        adapters=adapters,
        chain_manager=SimpleNamespace(distrust_stores=lambda: distrusted.append(True)),
        report=lambda *_: None,
    )
    for errand, invalid in enumerate([set(), {3}]):
        adapters.stores("a", errand)
        output = SimpleNamespace(
            kv_connector_worker_meta=ErrandMetadata(reports={errand: Report(1)}),
            invalid_block_ids=invalid,
            finished_recving=None,
        )
        connector.update_connector_output(output)
    assert distrusted == [True]
    assert adapters._storing == {}
