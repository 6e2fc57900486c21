"""Settings that had another name in 0.1 are read for one release, and said to be renamed."""

from __future__ import annotations

import pytest

from kvtier.config import LoadPolicy, load
from kvtier.errors import ConfigErrors

STACK = {"version": 1, "tiers": [{"kind": "memory", "capacity": "64MiB"}]}
BEFORE = {
    "loads": "worthwhile",
    "prefetch": {"restart": 0.5},
    "retain": {"longest": "2h"},
}


def test_the_names_of_before_are_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = load(STACK | BEFORE)
    assert found.load_policy is LoadPolicy.COST_MODEL
    assert found.prefetch.warmup_share == 0.5
    assert found.retain.max_ttl.seconds == 7200.0
    for name in ("load_policy", "cost_model", "warmup_share", "max_ttl"):
        assert any(name in message for message in caplog.messages)


def test_the_names_of_today_are_read_without_one(caplog: pytest.LogCaptureFixture) -> None:
    load(STACK | {"load_policy": "always", "retain": {"max_ttl": "2h"}})
    assert caplog.messages == []


def test_one_that_stands_there_twice_is_a_mistake() -> None:
    with pytest.raises(ConfigErrors, match="loads"):
        load(STACK | {"loads": "always", "load_policy": "always"})
