"""Which engines take embeddings from their clients as they would without a stack."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.vllm.plugin import OURS, brings_no_embeddings


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
