"""How policies are found by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scheduler.eviction_requests import keys

from kvtier.config import load
from kvtier.errors import ConfigError, ConfigErrors
from kvtier.eviction import create_policy, policy_class, policy_names
from kvtier.eviction import policy as registry
from kvtier.eviction.policy import EvictionPolicy


class TestRegistry:
    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Another package is installed, with a policy and something that is none."""
        info = tmp_path / "other_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-policies\nVersion: 1.0")
        (info / "entry_points.txt").write_text(
            "[kvtier.eviction]\noldest = other_policies:Oldest\nbroken = other_policies:WRONG\n"
            "lost = other_policies.lost:Lost\nraising = raising_policies:Raising\n"
        )
        (tmp_path / "raising_policies.py").write_text("raise RuntimeError('no device is here')\n")
        (tmp_path / "other_policies.py").write_text(
            "from kvtier.eviction.policy import LRU\n"
            "class Oldest(LRU):\n    name = 'oldest'\n"
            "WRONG = 3\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        registry._others.cache_clear()
        yield
        monkeypatch.undo()
        registry._others.cache_clear()
        registry.policy_class.cache_clear()

    def test_names_lead_to_classes_of_that_name(self) -> None:
        assert {"adaptive", "lru"} <= set(policy_names())
        for name in policy_names():
            assert issubclass(policy_class(name), EvictionPolicy)
            assert policy_class(name).name == name

    def test_an_unknown_name_is_explained(self) -> None:
        with pytest.raises(ConfigError, match=r"no eviction policy 'mru' - write one of adaptive,"):
            create_policy("mru")

    @pytest.mark.usefixtures("installed")
    def test_another_package_adds_a_policy(self) -> None:
        assert "oldest" in policy_names()
        policy = create_policy("oldest", 4)
        policy.use([0, 1], keys(0, 2), 1.0)
        assert policy.evict(1) == [1]

    @pytest.mark.usefixtures("installed")
    def test_what_is_no_policy_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="is no EvictionPolicy: 3"):
            create_policy("broken")

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("name", ["broken", "lost", "raising"])
    def test_a_stack_with_a_policy_that_cannot_be_used_is_refused(
        self, tmp_path: Path, name: str
    ) -> None:
        tiers = [
            {"kind": "cpu", "capacity": "1MiB"},
            {"kind": "nvme", "capacity": "1MiB", "path": str(tmp_path / "blocks")},
            {"kind": "object", "capacity": "1MiB", "url": (tmp_path / "store").as_uri()},
        ]
        tiers = [{**tier, "eviction": name} for tier in tiers]
        with pytest.raises(ConfigErrors) as caught:
            load({"version": 1, "tiers": tiers})
        places = [error.place for error in caught.value.errors]
        assert places == [f"$.tiers[{index}].eviction" for index in range(3)]
