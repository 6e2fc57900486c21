"""Where rates are kept, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import StackConfig, load
from kvtier.config.loader import rate_owner, rates_folder


def a_stack(folder: Path, **rates: object) -> StackConfig:
    cpu = {"kind": "cpu", "path": "/dev/shm", "capacity": "1GiB"}
    nvme = {"kind": "nvme", "path": str(folder), "capacity": "1GiB", "free_floor": 0}
    return load({"version": 1, "rates": rates, "tiers": [cpu, nvme]})


def test_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for state, folder in (
        ("/state", "/state/kvtier/rates"),
        ("not/absolute", "/home/somebody/.local/state/kvtier/rates"),
        ("", "/home/somebody/.local/state/kvtier/rates"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert rates_folder(a_stack(tmp_path)) == Path(folder)
    assert rates_folder(a_stack(tmp_path, path="/srv/rates")) == Path("/srv/rates")
    assert rates_folder(a_stack(tmp_path, path="~/rates")) == Path("/home/somebody/rates")
    assert rates_folder(a_stack(tmp_path, keep=False)) is None


def test_they_hold_for_a_device_a_model_and_places(tmp_path: Path) -> None:
    facts = {"platform": "a card", "model": "m", "dtype": "bfloat16", "engine": "vllm 1"}
    owner = rate_owner(a_stack(tmp_path), facts)
    assert owner == rate_owner(a_stack(tmp_path), facts | {"engine": "vllm 2"})
    others = [
        rate_owner(a_stack(tmp_path), facts | {"platform": "another card"}),
        rate_owner(a_stack(tmp_path), facts | {"tensor_parallel": "2"}),
        rate_owner(a_stack(tmp_path), facts | {"dtype": "float32"}),
        rate_owner(a_stack(tmp_path / "elsewhere"), facts),
    ]
    assert len({owner, *others}) == 5
