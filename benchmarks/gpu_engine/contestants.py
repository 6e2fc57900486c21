"""Who is measured: an engine without a connector, with kvtier, and with vLLM's own offloading."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine.scale import Scale

WITHOUT, KVTIER, KVTIER_MEMORY = "without", "kvtier", "kvtier in memory"
OFFLOADING, TIERING = "vLLM offloading", "vLLM tiering"


class Places:
    """Where contestants keep what they have; given back when a run ends."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self.memory = memory
        self.disk = folder / "disk"
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_memory(self) -> None:
        """As after a loss of power: CPU memory goes."""
        for path in self.memory.iterdir():
            path.unlink()

    def clear(self) -> None:
        self.forget_memory()
        shutil.rmtree(self.disk, ignore_errors=True)

    def close(self) -> None:
        self.clear()
        self.memory.rmdir()

    def left_in_memory(self) -> int:
        """Bytes."""
        return sum(path.stat().st_blocks * 512 for path in self.memory.iterdir())


def stack(
    places: Places,
    cpu_bytes: int,
    nvme_bytes: int,
    **more: Any,
) -> dict[str, Any]:
    """kvtier's: CPU memory, and a disk if it has bytes."""
    tiers: list[dict[str, Any]] = [
        {"kind": "cpu", "path": str(places.memory), "capacity": cpu_bytes, "load_deadline": "30s"}
    ]
    if nvme_bytes:
        places.disk.mkdir(parents=True, exist_ok=True)
        tiers.append(
            {
                "kind": "nvme",
                "path": str(places.disk / "kvtier"),
                "capacity": nvme_bytes,
                "free_floor": "1GiB",
                "load_deadline": "30s",
            }
        )
    rates = {"path": str(places.folder / "rates")}
    prefetch = {"warmup_share": 0.0}  # what comes from disk is to be seen
    fixed = {"version": 1, "name": "gpu-engine", "rates": rates, "prefetch": prefetch}
    return {**fixed, "tiers": tiers, **more}


def of_kvtier(stack: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's settings for a stack."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"stack": stack},
    }


def transfer_config(
    contestant: str, scale: Scale, places: Places, **more: Any
) -> dict[str, Any] | None:
    """What vLLM is told; `more` are settings of kvtier's stack."""
    if contestant == WITHOUT:
        return None
    if contestant in (KVTIER, KVTIER_MEMORY):
        disk = scale.nvme_bytes if contestant == KVTIER else 0
        return of_kvtier(stack(places, scale.cpu_bytes, disk, **more))
    extra: dict[str, Any] = {"cpu_bytes_to_use": scale.cpu_bytes}
    if contestant == TIERING:
        root = places.disk / "tiering"
        root.mkdir(parents=True, exist_ok=True)
        extra |= {
            "spec_name": "TieringOffloadingSpec",
            "block_size": 256,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
