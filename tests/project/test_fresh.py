"""What is made from the types and committed is what the types make today: else `make docs`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvtier.config import load
from kvtier.config.schema import descriptions, json_schema
from kvtier.interfaces.backend import backend, kinds
from tools.configuration_reference import reference

ROOT = Path(__file__).parents[2]
STACKS = sorted((ROOT / "configs").glob("*.yaml"))


def test_the_schema_is_fresh() -> None:
    committed = json.loads((ROOT / "configs" / "schema.json").read_text())
    assert committed == json.loads(json.dumps(json_schema(kinds(built_in=True)))), "make docs"


def test_the_reference_is_fresh() -> None:
    committed = (ROOT / "docs/reference/configuration.md").read_text()
    assert committed.rstrip() == reference(kinds(built_in=True)).rstrip(), "make docs"


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.stem)
def test_ready_stacks_are_right(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_FOLDER", str(tmp_path / "blocks"))
    monkeypatch.setenv("KVTIER_BUCKET", "s3://bucket/prefix")
    monkeypatch.setenv("KVTIER_MOONCAKE_MASTER", "127.0.0.1:50051")
    monkeypatch.setattr("kvtier.backends.mooncake.backend.store_module", lambda: None)
    monkeypatch.setenv("KVTIER_NAME", "second")
    config = load(path, record_bytes=4 << 20)
    assert len(config.tiers) > 1
    assert config.name == "second", "the environment names each engine of a machine"


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.stem)
def test_ready_stacks_are_right_for_editors(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=./schema.json\n")
    jsonschema.validate(
        yaml.safe_load(text), json_schema(kinds(built_in=True)), jsonschema.Draft202012Validator
    )


@pytest.mark.parametrize("kind", kinds(built_in=True))
def test_every_setting_is_described(kind: str) -> None:
    settings = backend(kind).settings
    assert set(settings.__struct_fields__) == set(descriptions(settings))
