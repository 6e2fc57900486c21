"""Credentials that come, go, are renewed, or cannot be had."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.object.object_servers import (
    BODY,
    HostileServer,
    Opener,
    Peer,
    ServerProcess,
    answer,
    error_body,
    get_body,
)

from kvtier.backends.object.stores import credentials, errors
from kvtier.backends.object.stores.credentials import CredentialChain

pytestmark = pytest.mark.s3


def test_credentials_may_come_after_the_start(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = opened(endpoint=server.endpoint)
    with pytest.raises(errors.NoCredentials, match="AWS_ACCESS_KEY_ID"):
        get_body(store)
    with pytest.raises(errors.NoCredentials):
        store.delete([f"n{index}" for index in range(9)])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "late")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "but here")
    assert get_body(store) == BODY


def test_a_profile_of_the_users_files(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text("[profile kv]\nregion = eu-north-1\n")
    keys.write_text("[kv]\naws_access_key_id = OFTHEPROFILE\naws_secret_access_key = SK\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    assert get_body(opened(endpoint=server.endpoint, profile="kv")) == BODY
    assert b"Credential=OFTHEPROFILE%2F" in server.heads[0]
    assert b"%2Feu-north-1%2Fs3%2F" in server.heads[0]


def test_who_hands_out_credentials_may_hang(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the user's, say: calls end all the same, and it is not started once more."""
    provided, asked, plain = (
        threading.Event(),
        list[CredentialChain](),
        CredentialChain._find_source,
    )

    def hangs(signer: CredentialChain) -> Any:
        asked.append(signer)
        provided.wait(20.0)
        return plain(signer)

    monkeypatch.setattr(CredentialChain, "_find_source", hangs)
    monkeypatch.setattr(credentials, "_LOOKUP_S", 0.05)
    store = opened(endpoint=server.endpoint)
    for _ in range(2):
        with pytest.raises(errors.NoCredentials, match="in time"):
            get_body(store)
    provided.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-credentials":
            thread.join()
    assert len(asked) == 1
    monkeypatch.setattr(credentials, "_LOOKUP_S", 20.0)
    assert get_body(store) == BODY


def test_no_call_waits_for_credentials_beyond_its_deadline(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    provided, plain = threading.Event(), CredentialChain._find_source

    def hangs(signer: CredentialChain) -> Any:
        provided.wait(20.0)
        return plain(signer)

    monkeypatch.setattr(CredentialChain, "_find_source", hangs)
    store = opened(endpoint=server.endpoint)
    began = time.monotonic()
    soon = began + 0.2
    calls: list[Callable[[], object]] = [
        lambda: store.get("a", memoryview(bytearray(1)), deadline=soon),
        lambda: store.put("a", [memoryview(b"x")], deadline=soon),
        lambda: store.head("a", deadline=soon),
        lambda: list(store.list(deadline=soon)),
        lambda: store.delete(["a"], deadline=soon),
        lambda: store.delete([f"n{index}" for index in range(9)], deadline=soon),
    ]
    with ThreadPoolExecutor(len(calls)) as threads:
        errs = [each.exception() for each in [threads.submit(call) for call in calls]]
    took = time.monotonic() - began
    provided.set()
    assert {type(error) for error in errs} == {errors.NoCredentials}
    assert took < credentials._LOOKUP_S / 2


def test_web_identity_gives_a_role(
    opened: Opener,
    server: HostileServer,
    moto_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As in a pod of Kubernetes: a token in a file, exchanged for keys that expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    token.write_text("token-of-the-pod")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto_server.endpoint)
    assert get_body(opened(endpoint=server.endpoint)) == BODY
    assert b"Credential=ASIA" in server.heads[0]
    assert b"x-amz-security-token=" in server.heads[0].lower()
    assert b"token-of-the-pod" not in server.heads[0]


def test_nobody_is_asked_for_a_role_before_it_is_needed(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an instance of AWS itself, whose endpoint stands in no setting."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint)
    store = opened()
    assert not server.heads
    with pytest.raises(errors.NoCredentials):
        get_body(store)
    assert server.heads


@pytest.mark.parametrize("silent", [False, True])
def test_a_role_that_is_not_given(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: bool
) -> None:
    """No token file; or one, and a service that never answers: many ask, and none waits long."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(credentials, "_READ_S", 0.2)
    monkeypatch.setattr(credentials, "_ATTEMPTS", 1)
    token = tmp_path / "token"
    if silent:
        token.write_text("token-of-the-pod")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    with HostileServer(lambda peer, head: None) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.endpoint)
        store = opened(endpoint="http://127.0.0.1:1")

        def ask(_: int) -> str:
            with pytest.raises(errors.NoCredentials) as caught:
                get_body(store)
            return str(caught.value)

        with ThreadPoolExecutor(16) as many:
            said = set(many.map(ask, range(16)))
        assert len(service.heads) <= (4 if silent else 0)
    assert len(said) == 1
    assert "token-of" not in said.pop()


def test_an_unknown_profile_is_said_so(opened: Opener) -> None:
    with pytest.raises(errors.NoCredentials, match="profile"):
        opened(endpoint="http://127.0.0.1:1", profile="nobody")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"])
@pytest.mark.parametrize("wrong", ["AKI\u200bD", "AKID\n", "\udcff"])
def test_credentials_that_were_copied_with_something_else_are_said_so(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    monkeypatch.setenv(name, wrong)
    store = opened(endpoint=server.endpoint)
    for call in (lambda: get_body(store), lambda: store.delete([f"n{n}" for n in range(9)])):
        with pytest.raises(errors.NoCredentials, match="character") as caught:
            call()
        assert wrong not in str(caught.value)
    assert not server.heads


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("AWS_SESSION_TOKEN", 400, "ExpiredToken"),
        ("AWS_ACCESS_KEY_ID", 403, "InvalidAccessKeyId"),
        ("AWS_ACCESS_KEY_ID", 403, "InvalidSecurity"),  # Google's
        ("AWS_ACCESS_KEY_ID", 401, "Unauthorized"),  # Cloudflare's
    ],
)
def test_an_expired_token_or_a_key_that_was_rotated_makes_the_chain_start_anew(
    opened: Opener,
    server: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: int,
    code: str,
) -> None:
    monkeypatch.setenv(name, "old")
    monkeypatch.setattr(credentials, "_RENEW_PAUSE_S", 0.0)

    def picky(peer: Peer, head: bytes) -> None:
        fresh = b"token=new" in head.lower() or b"credential=new" in head.lower()
        peer.sendall(answer(200, BODY) if fresh else answer(status, error_body(code)))

    server.script = picky
    store = opened(endpoint=server.endpoint)
    with pytest.raises(errors.Misconfigured):
        get_body(store)
    monkeypatch.setenv(name, "new")
    assert get_body(store) == BODY


def test_a_secret_that_was_rotated_alone_makes_the_chain_start_anew(
    opened: Opener, rclone_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a user of MinIO, whose key is its name and stays."""
    monkeypatch.setattr(credentials, "_RENEW_PAUSE_S", 0.0)
    right = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "old")
    store = opened(endpoint=rclone_server.endpoint)
    with pytest.raises(errors.AccessDenied, match="secret"):
        list(store.list("none/"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", right)
    assert list(store.list("none/")) == []


def test_a_config_file_that_is_damaged(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[profile kv\nregion")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(errors.NoCredentials, match="profile"):
        opened(endpoint="http://127.0.0.1:1", profile="kv")
