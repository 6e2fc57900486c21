"""The object tier's settings: what is refused, with the place and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.object.object_servers import SECRET_KEY

from kvtier.backends.object import BACKEND, ObjectSettings
from kvtier.backends.object.backend import _codec
from kvtier.backends.object.settings import _bucket, parse_url
from kvtier.errors import ConfigError
from kvtier.interfaces.backend import TierContext
from kvtier.record.codec import Codec
from kvtier.settings import Capacity, Duration
from kvtier.types import Namespace

RECORD = 1 << 20


def settings(**more: Any) -> ObjectSettings:
    values = {"url": "s3://bucket/kv", "capacity": Capacity.parse("1GiB"), **more}
    return ObjectSettings(**values)


WRONG = [
    ({"url": "bucket/kv"}, ".url", "s3://bucket/prefix"),
    ({"url": "s3://key:hidden@bucket/x"}, ".url", "environment"),
    ({"url": "file:///no/such/folder/at/all"}, ".url", "name one that exists"),
    ({"url": "s3://b/kv"}, ".url", "correct the url"),
    ({"endpoint": "localhost:9000"}, ".endpoint", "https://host:port"),
    ({"endpoint": "http://me:hidden@there"}, ".endpoint", "https://host:port"),
    ({"capacity": Capacity.parse("80%")}, ".capacity", "2TiB"),
    ({"capacity": Capacity.parse("1KiB")}, ".capacity", str(RECORD)),
    ({"capacity": Capacity.parse(2)}, ".capacity", "a number without a unit is bytes"),
    ({"region": "eu west"}, ".region", "eu-west-1"),
    ({"ca_bundle": "/no/such/file"}, ".ca_bundle", "PEM"),
    ({"refresh": Duration(0.0)}, ".refresh", "10ms"),
    ({"audit": Duration(0.0)}, ".audit", "100ms"),
    ({"age_max": Duration(0.0)}, ".age_max", "1s"),
    ({"connect_timeout": Duration(0.0)}, ".connect_timeout", "1ms"),
    ({"idle_timeout": Duration(0.0)}, ".idle_timeout", "1ms"),
    ({"eviction": "magic"}, ".eviction", "lru"),
]


@pytest.mark.parametrize(("more", "place", "remedy"), WRONG)
def test_what_cannot_work_is_refused(more: dict[str, Any], place: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BACKEND.check(settings(**more), RECORD)
    assert caught.value.place == place
    assert remedy in caught.value.remedy
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(("idle_s", "upload_s"), [(2.0, 15.0), (60.0, 60.0)])
def test_a_longer_idle_timeout_holds_for_uploads(idle_s: float, upload_s: float) -> None:
    """Whose answers come late: stores are silent while they write."""
    chosen = settings(idle_timeout=Duration(idle_s))
    timeouts = _bucket(chosen, parse_url(chosen.url)).timeouts
    assert (timeouts.idle_s, timeouts.upload_s) == (idle_s, upload_s)


def test_what_can_work_is_taken(tmp_path: Path) -> None:
    BACKEND.check(settings(), RECORD)
    BACKEND.check(settings(url=f"file://{tmp_path}/new", capacity=Capacity.parse("10%")), RECORD)


def test_two_tiers_on_one_place_are_recognised(tmp_path: Path) -> None:
    same = [f"file://{tmp_path}/a", f"file://{tmp_path}/b/../a"]
    assert len({BACKEND.identity(settings(url=url)) for url in same}) == 1
    assert BACKEND.identity(settings()) == BACKEND.identity(settings(url="s3://bucket/kv/"))
    assert BACKEND.identity(settings()) != BACKEND.identity(settings(endpoint="http://there"))


@pytest.mark.parametrize(
    ("url", "facts", "codec"),
    [
        ("s3://b/k", {"dtype": "torch.bfloat16", "kv_dtype": "auto"}, Codec.SPLIT_ZSTD),
        ("s3://b/k", {"dtype": "torch.bfloat16", "kv_dtype": "fp8_e4m3"}, Codec.ZSTD),
        ("s3://b/k", {}, Codec.ZSTD),
        ("file:///b/k", {"dtype": "torch.bfloat16"}, Codec.RAW),
    ],
)
def test_the_codec_follows_what_is_cached(url: str, facts: dict[str, str], codec: Codec) -> None:
    assert _codec(settings(url=url), Namespace(facts=facts, group_bytes=(8,))) is codec


def test_settings_show_no_secret() -> None:
    assert SECRET_KEY not in repr(settings())


def test_a_mover_is_told_how_long_calls_may_take(tmp_path: Path) -> None:
    """Until their own deadlines: a process with a slow upload does not hang."""
    slow = {"load_deadline": Duration(7.0), "store_deadline": Duration(70.0)}
    context = TierContext(Namespace(facts={}, group_bytes=(4096,)))
    handler = BACKEND.open_handler(settings(url=(tmp_path / "kv").as_uri(), **slow), context)
    assert (handler.call_seconds, handler.store_seconds) == (7.0, 70.0)
    handler.close()
