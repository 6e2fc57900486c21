"""What vLLM's offloading or LMCache is told, as a stack that `config check` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import app

LMCACHE = """\
chunk_size: 512
max_local_cpu_size: 0.0625
local_disk: "file://{folder}"
max_local_disk_size: 2.5
remote_url: s3://bucket.s3.eu-west-1.amazonaws.com/prefix
cache_policy: LRU
blocking_timeout_secs: 5
enable_p2p: true
extra_config: {{s3_region: eu-west-1, aws_secret_access_key: hidden}}
"""


def migrated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The stack, and the whole text; `config check` takes it."""
    assert app.run(["migrate", *words]) == 0
    text = capsys.readouterr().out
    return yaml.safe_load(text), text


def checked(text: str, folder: Path) -> None:
    file = folder / "stack.yaml"
    file.write_text(text)
    assert app.run(["config", "check", str(file)]) == 0


def transfer(**extra: Any) -> str:
    return json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
    )


def test_the_size_of_vllms_cpu_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vllm", "serve", "./model", "--kv_offloading_size=0.25", "--port", "8001"]
    stack, text = migrated(capsys, *words)
    assert stack == {"version": 1, "tiers": [{"kind": "cpu", "capacity": "256MiB"}]}
    assert "kvtier serve ./model --config stack.yaml -- --port 8001\n" in text
    checked(text, tmp_path)


def test_all_tiers_of_vllms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = {"bucket": "bucket", "endpoint_override": "minio:9000", "secret_key": "hidden"}
    given = transfer(
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=1 << 28,
        blocks_per_chunk=8,
        store_threshold=2,
        eviction_policy="arc",
        secondary_tiers=[
            {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 16, "n_write_threads": 4},
            {"type": "obj", "prefix": "kv/", "store_config": store, "io_threads": 8},
            {"type": "p2p"},
        ],
    )
    stack, text = migrated(capsys, "--block-size", "32", "--kv-transfer-config", given)
    assert stack["chunk_tokens"] == 256
    cpu, disk, bucket = stack["tiers"]
    assert cpu == {"kind": "cpu", "capacity": "256MiB", "admission": "second_touch"}
    assert (disk["path"], disk["threads"]) == (str(tmp_path / "kvtier"), 16)
    assert (bucket["url"], bucket["endpoint"]) == ("s3://bucket/kv", "http://minio:9000")
    assert "hidden" not in text
    for said in ("secret_key: a secret", "eviction arc", "type p2p: kvtier has no such tier"):
        assert said in text
    checked(text, tmp_path)


@pytest.mark.parametrize("flag", ["--block-size 32", "--block-size=32", "--block_size=32"])
def test_chunks_of_so_many_blocks(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = transfer(cpu_bytes_to_use=1 << 28, blocks_per_chunk=8)
    stack, text = migrated(capsys, *flag.split(), "--kv-transfer-config", given)
    assert stack["chunk_tokens"] == 8 * 32
    assert f" -- {flag}\n" in text


def test_lmcache_inside_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(LMCACHE.format(folder=tmp_path))
    stack, text = migrated(capsys, str(file))
    assert stack["chunk_tokens"] == 512
    cpu, disk, bucket = stack["tiers"]
    assert cpu == {"kind": "cpu", "capacity": "64MiB", "eviction": "lru"}
    assert (disk["capacity"], disk["load_deadline"]) == ("2560MiB", "5s")
    assert (bucket["url"], bucket["region"]) == ("s3://bucket/prefix", "eu-west-1")
    assert "hidden" not in text
    assert "enable_p2p: has no counterpart" in text
    checked(text, tmp_path)


def test_lmcaches_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = {"type": "fs_native", "base_path": str(tmp_path), "max_capacity_gb": 2, "eviction": {}}
    store = {
        "type": "s3",
        "s3_endpoint": "bucket.minio:9000",
        "s3_region": "a",
        "disable_tls": True,
    }
    adapters = [each for tier in (disk, store) for each in ("--l2-adapter", json.dumps(tier))]
    words = ["lmcache", "server", "--l1-size-gb", "0.25", *adapters, "--max-workers", "4"]
    stack, text = migrated(capsys, *words)
    assert [tier["kind"] for tier in stack["tiers"]] == ["cpu", "nvme", "object"]
    assert stack["tiers"][1]["capacity"] == "2GiB"
    assert stack["tiers"][2]["endpoint"] == "http://minio:9000"
    assert stack["tiers"][2]["addressing"] == "virtual"
    assert "max_workers: has no counterpart" in text
    checked(text, tmp_path)


def test_what_looks_like_a_variable_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    folder = tmp_path / "a${SECRET}"
    folder.mkdir()
    file = tmp_path / "lmcache.yaml"
    file.write_text(LMCACHE.format(folder=folder))
    _, text = migrated(capsys, str(file))
    assert "hidden" not in text
    checked(text, tmp_path)
    assert app.run(["config", "show", str(tmp_path / "stack.yaml")]) == 0
    assert "a${SECRET}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "says nothing to migrate from - write kvtier migrate lmcache.yaml"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["--kv-offloading-size", "much"], "--kv-offloading-size: 'much' is no number"),
        (["--kv-transfer-config", "[1]"], "--kv-transfer-config: [1] has no settings"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config: is no JSON"),
        (["--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector"}'], "names LMCache"),
        (["--kv-transfer-config", '{"kv_connector": "Nixl"}'], "Nixl is no offloading of vLLM's"),
        (["--port", "8000"], "--kv-offloading-size: is missing"),
        (["lmcache", "server"], "--l1-size-gb: is missing"),
        (
            ["--l1-size-gb=1", "--l2-adapter", '{"type": "s3", "s3_endpoint": "[::1"}'],
            "s3://[::1: is no url: Invalid IPv6 URL",
        ),
    ],
)
def test_what_cannot_be_read(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["migrate", *words]) == 2
    assert says in capsys.readouterr().err
