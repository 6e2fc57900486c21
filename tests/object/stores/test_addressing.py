"""How a bucket is reached: clouds, urls, endpoints, addressing, regions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.object import object_servers
from support.object.object_servers import (
    BODY,
    HostileServer,
    Opener,
    ServerProcess,
    answer,
    get_body,
    serve_body,
)

from kvtier.backends.object.settings import ObjectSettings, open_for, parse_url
from kvtier.backends.object.stores import clouds, errors
from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, find_place
from kvtier.backends.object.stores.store import PutOutcome, Store
from kvtier.errors import ExtraMissing
from kvtier.settings import Capacity

pytestmark = pytest.mark.s3


def open_at(url: str, **more: Any) -> Store:
    return open_for(ObjectSettings(url=url, capacity=Capacity.parse("1GiB"), **more))


def test_path_and_virtual_host_addressing(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.endpoint)  # which needs no name server
    for style, target in (
        ("path", "http://s3.example.test/bucket/a%20b/name"),
        ("virtual", "http://bucket.s3.example.test/a%20b/name"),
    ):
        there = {"endpoint": "http://s3.example.test", "addressing": style}
        store = open_at("s3://bucket/a%20b", **there)
        store.put("name", [memoryview(BODY)])
        assert store.get("name", memoryview(bytearray(len(BODY)))) == len(BODY)
        lines = [head.split(b"\r\n")[0].decode() for head in server.heads[-2:]]
        assert lines == [f"PUT {target} HTTP/1.1", f"GET {target} HTTP/1.1"]
        store.close()


@pytest.mark.parametrize(
    ("endpoint", "style", "found"),
    [
        ("https://there/base", "path", "https://there/base"),
        ("http://there/base//", "virtual", "http://bucket.there/base"),
        ("http://[::1]:9000", "path", "http://[::1]:9000"),
    ],
)
def test_an_endpoint_below_a_path(endpoint: str, style: Any, found: str) -> None:
    settings = BucketSettings(bucket="bucket", endpoint=endpoint, addressing=style)
    assert find_place(settings).endpoint == found


@pytest.mark.parametrize("by", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile", "services"])
def test_an_endpoint_of_the_environment_or_the_profile_is_not_asked_for_names_below_it(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    if by.startswith("AWS"):
        monkeypatch.setenv(by, server.endpoint)
    else:
        section = "[default]\nservices = here\n[services here]\ns3 =\n  "
        section = section if by == "services" else "[default]\n"
        config = tmp_path / "config"
        config.write_text(f"{section}endpoint_url = {server.endpoint}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = open_at("s3://bucket/a")
    store.put("name", [memoryview(BODY)])
    assert server.heads[-1].startswith(b"PUT /bucket/a/name HTTP/1.1")
    store.close()


def test_bulk_deletes_are_signed_for_the_host_that_they_name(
    rclone_server: ServerProcess, opened: Opener
) -> None:
    """By a server that looks at signatures, at an endpoint with capital letters."""
    store = opened(endpoint=f"http://LocalHost:{rclone_server.port}", prefix="capitals")
    names = [f"n{index}" for index in range(9)]
    for name in names:
        store.put(name, [memoryview(b"x")])
    assert store.delete(names) == {}
    assert list(store.list()) == []


def test_an_ipv6_endpoint(opened: Opener) -> None:
    with HostileServer(serve_body, host="::1") as server:
        store = opened(endpoint=f"http://[::1]:{server.port}")
        assert get_body(store) == BODY
        store.delete([f"n{index}" for index in range(9)])  # in bulk, in vain, and singly
    host = f"host: [::1]:{server.port}".encode()
    assert all(host in head for head in server.heads)


def test_aws_itself_is_addressed_by_host() -> None:
    store = BucketStore(BucketSettings(bucket="my-bucket", region="eu-west-1"))
    assert "https://my-bucket.s3.eu-west-1.amazonaws.com" in repr(store)


def test_the_region_is_signed(opened: Opener, server: HostileServer) -> None:
    store = opened(endpoint=server.endpoint, region="eu-north-1")
    get_body(store)
    assert b"%2Feu-north-1%2Fs3%2Faws4_request" in server.heads[0]
    store.put("name", [memoryview(BODY)])
    assert b"/eu-north-1/s3/aws4_request" in server.heads[1]
    assert b"user-agent: kvtier/" in server.heads[1], "firewalls refuse those that say nothing"


@pytest.mark.parametrize(
    "url",
    [
        "http://x/y",
        "s3://",
        "s3://user:pw@bucket/x",
        "az://key@container/x",
        "s3://bucket/x?y",
        "s3://bucket/x#y",
        "s3://[x",
        "file://host/folder",
        "file:///folder%00",
        "folder",
        "file:",
        "",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(errors.WrongEndpoint):
        parse_url(url)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ftp://x",
        "127.0.0.1:9000",
        "http://user:hidden@host",
        "http://:hidden@host",
        "http:///bucket",
        "http://host/#y",
        "",
        "http://host:99999",
        "http://host:http",
        "http://host:0",
        "http://[::1",
        "http://h\u00f6st",
        "http://host/?x=y",
    ],
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(errors.WrongEndpoint) as caught:
        open_at("s3://bucket/x", endpoint=endpoint)
    assert "hidden" not in str(caught.value)


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissing, match=r"kvtier\[object\]"):
        open_at("gs://bucket/x")


def test_boto3_is_needed_for_profiles_alone(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clouds, "has_botocore", lambda: False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    store = opened()
    assert get_body(store) == BODY
    store.put("name", [memoryview(BODY)])
    key = object_servers.ACCESS_KEY.encode()
    assert all(b"Credential=" + key in head for head in server.heads)
    with pytest.raises(errors.NoCredentials, match=r"kvtier\[s3\]"):
        opened(profile="kv")


@pytest.mark.parametrize(
    ("url", "settings", "setting"),
    [
        ("s3://UP~/x", {}, "url"),
        ("az://a--b/x", {}, "url"),
        ("az://ab/x", {}, "url"),
        ("gs://Bucket/x", {}, "url"),
        ("s3://bucket/a//b", {}, "url"),
        ("s3://bucket/../b", {}, "url"),
        ("gs://bucket/x", {"region": "eu-west-1"}, "region"),
        ("az://container/x", {"profile": "kv"}, "profile"),
    ],
)
def test_what_no_cloud_has(url: str, settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(errors.Misconfigured) as caught:
        open_at(url, **settings)
    assert caught.value.setting == setting


def test_google_is_asked_by_its_own_protocol(
    opened: Opener, server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No emulator takes its PUT: only what is sent is looked at."""
    account = {
        "gcs_base_url": server.endpoint,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    named = tmp_path / "account.json"
    named.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(named))
    store = opened(cloud="gs", prefix="a", endpoint=server.endpoint)
    date = "Sat, 28 Nov 2026 00:00:00 GMT"
    server.script = lambda peer, head: peer.sendall(answer(200, BODY, last_modified=date))
    assert get_body(store) == BODY
    server.script = lambda peer, head: (
        peer.read_body(head),
        peer.sendall(answer(200, x_goog_generation="7")),
    )[1]
    store.put("name", [memoryview(BODY)], if_absent=True)
    server.script = lambda peer, head: peer.sendall(answer(412))
    found = store.put("name", [memoryview(b"")], if_absent=True)
    assert found is PutOutcome.ALREADY_THERE
    lines = [head.split(b"\r\n")[0] for head in server.heads]
    assert lines == [b"GET /bucket/a%2Fname HTTP/1.1", *[b"PUT /bucket/a%2Fname HTTP/1.1"] * 2]
    assert b"x-goog-if-generation-match: 0" in server.heads[1]


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[bad", "http://host:port"])
def test_an_endpoint_of_the_environment_that_is_none(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(errors.WrongEndpoint):
        opened()


@pytest.mark.parametrize("region", ["eu west", "eu\r\nx: y", "a/b"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_a_region_that_is_none(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, region: str, from_environment: bool
) -> None:
    settings = {"endpoint": "http://127.0.0.1:1"}
    if from_environment:
        monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    else:
        settings["region"] = region
    with pytest.raises(errors.WrongRegion, match="is no region"):
        opened(**settings)
