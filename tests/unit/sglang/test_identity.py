"""Which SGLang is served, and when other weights are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.sglang import TESTED, identity


class Storage:
    """SGLang's interface, as far as it is called."""

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any: ...
    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...
    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...
    def register_mem_pool_host(self, mem_pool_host: Any) -> Any: ...
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> Any: ...
    def on_host_pools_registered(self) -> Any: ...
    def clear(self) -> Any: ...


class Changed(Storage):
    def batch_get_v1(self, keys: Any, buffers: Any) -> Any: ...


@pytest.fixture(autouse=True)
def weights_as_before() -> Iterator[None]:
    yield
    identity.weights_changed.clear()


def test_another_version_is_refused_only_where_it_calls_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "version", lambda _: TESTED[0])
    assert identity.check_version(object) == TESTED[0], "what was tried needs no look"
    monkeypatch.setattr(identity, "version", lambda _: "0.9.0")
    assert identity.check_version(Storage) == "0.9.0"
    assert "never tested" in caplog.text
    with pytest.raises(ConfigError, match=r"another way: batch_get_v1 - install 0\.5\.23"):
        identity.check_version(Changed)


def make_updater() -> type:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError("halfway")

    return type("WeightUpdater", (), dict.fromkeys(identity._WATCHED, fail))


@pytest.mark.parametrize("name", identity._WATCHED)
def test_every_way_to_other_weights_is_noticed(name: str) -> None:
    updater = make_updater()
    for _ in range(2):  # ranks of one process, or a second attachment
        identity.watch_weights(updater, attached_late=False)
    assert not identity.weights_changed.is_set()
    with pytest.raises(RuntimeError):
        getattr(updater(), name)("folder")
    assert identity.weights_changed.is_set()
    with pytest.raises(ConfigError, match="may have taken other weights"):
        identity.watch_weights(updater, attached_late=False)


def test_a_late_attachment_is_refused() -> None:
    with pytest.raises(ConfigError, match="start the engine with"):
        identity.watch_weights(make_updater(), attached_late=True)


@pytest.mark.parametrize(
    ("lora", "sees", "reason"),
    [(True, False, "--enable-lora"), (False, True, "sees images"), (False, False, None)],
)
def test_engines_whose_keys_do_not_tell_enough_are_refused(
    lora: bool, sees: bool, reason: str | None
) -> None:
    arguments, model = SimpleNamespace(enable_lora=lora), SimpleNamespace(is_multimodal=sees)
    if reason is None:
        identity.refuse(arguments, model)
        return
    with pytest.raises(ConfigError, match=reason):
        identity.refuse(arguments, model)
