"""Which SGLang is served, and when other weights are noticed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.sglang import TESTED, identity


class Storage:
    """SGLang's interface, as far as it is called."""

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any: ...
    def batch_exists_v2(
        self, keys: Any, pool_transfers: Any = None, extra_info: Any = None
    ) -> Any: ...
    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...
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


def make_updater(*, wrapped: bool = False) -> type:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError("halfway")

    method = functools.wraps(fail)(lambda *given: fail(*given)) if wrapped else fail
    return type("WeightUpdater", (), dict.fromkeys(identity._WATCHED, method))


@pytest.mark.parametrize("name", identity._WATCHED)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_way_to_other_weights_is_noticed(name: str, wrapped: bool) -> None:
    """Also if SGLang's methods are decorated."""
    updater = make_updater(wrapped=wrapped)
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


class States:
    """A pool of states, as SGLang has them."""

    layout, storage_format_tag, page_size = "page_first", None, 1

    def __init__(self, dtype: str = "float32", sizes: tuple[int, ...] = (8192, 1024)) -> None:
        self.kv_buffer = [SimpleNamespace(dtype=dtype), SimpleNamespace(dtype="bfloat16")]
        self._sizes = list(sizes)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        return [0] * len(self._sizes) * len(indices), self._sizes * len(indices)


def test_what_lies_in_other_pools_is_part_of_an_engine_s_facts() -> None:
    def facts(pools: dict[str, Any], **chosen: Any) -> dict[str, str]:
        return identity.facts_of_pools(SimpleNamespace(**chosen), pools)

    other = States()
    other.layout = "page_first_direct"
    found = [
        facts({"mamba": States()}),
        facts({"mamba": States("float16")}),
        facts({"mamba": States(sizes=(1024, 8192))}),
        facts({"mamba": other}),
        facts({"swa": States()}),
        facts({"mamba": States()}, mamba_radix_cache_strategy="extra_buffer"),
        facts({"mamba": States(), "swa": States()}),
    ]
    assert len({str(sorted(each.items())) for each in found}) == len(found)
    assert facts({"mamba": States()}) == found[0]
    assert facts({}, mamba_ssm_dtype="float16") == {}, "and nothing changes where there are none"


def test_replicas_that_share_kv_cache_but_not_states_are_refused() -> None:
    ranks = SimpleNamespace(is_mla_model=True, tp_size=2)
    with pytest.raises(ConfigError, match="perhaps not mamba"):
        identity.refuse_pools(ranks, {"mamba": States()})
    identity.refuse_pools(ranks, {})
    identity.refuse_pools(SimpleNamespace(is_mla_model=True, tp_size=1), {"mamba": States()})
    identity.refuse_pools(SimpleNamespace(is_mla_model=False, tp_size=2), {"mamba": States()})
