"""Which engines take embeddings from their clients as they would without a stack."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.hooks.config import OURS, brings_no_embeddings, refuse_missing_embeddings


@pytest.mark.parametrize(
    ("connector", "embeddings", "undone"),
    [
        (None, None, False),
        (OURS, None, True),
        (OURS, "ec_producer", True),
        (OURS, "ec_consumer", False),
        ("MultiConnector", None, False),
        ("NixlConnector", None, False),
    ],
)
def test_ours_brings_none(connector: str | None, embeddings: str | None, undone: bool) -> None:
    config = SimpleNamespace(
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
        ec_transfer_config=embeddings
        and SimpleNamespace(is_ec_consumer=embeddings == "ec_consumer"),
    )
    assert brings_no_embeddings(config) is undone


def test_another_plugin_may_have_been_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class VllmConfig:
        def __init__(self, connector: str) -> None:
            self.kv_transfer_config = SimpleNamespace(kv_connector=connector)
            self.ec_transfer_config = None
            self.resolved = 0

        def _resolve_mm_embedding_inputs(self) -> None:
            self.resolved += 1

        @functools.wraps(_resolve_mm_embedding_inputs)
        def traced(self, before: Any = _resolve_mm_embedding_inputs) -> None:
            before(self)

        _resolve_mm_embedding_inputs = traced

    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(VllmConfig=VllmConfig))  # type: ignore[arg-type]
    refuse_missing_embeddings.cache_clear()
    refuse_missing_embeddings()
    refuse_missing_embeddings()
    refuse_missing_embeddings.cache_clear()
    ours, theirs = VllmConfig(OURS), VllmConfig("NixlConnector")
    ours._resolve_mm_embedding_inputs()
    theirs._resolve_mm_embedding_inputs()
    assert (ours.resolved, theirs.resolved) == (0, 1)
