"""Programs of the user's that hand out credentials: wrong words, failures, and silence."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from support.object.object_servers import (
    BODY,
    HostileServer,
    Opener,
    get_body,
)

from kvtier.backends.object.stores import credentials, errors

pytestmark = pytest.mark.s3


def helped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, helper: str) -> None:
    """Credentials come from a program, in a profile of this name."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(f"[profile helped]\ncredential_process = {helper}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))


LONG_AGO = "2001-01-01T00:00:00Z"
EXPIRED = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "hidden", "Expiration": LONG_AGO}


@pytest.mark.parametrize("output", ["nonsense", "{}", json.dumps(EXPIRED)])
def test_a_helper_that_says_nonsense(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    (tmp_path / "said").write_text(output)
    helped(monkeypatch, tmp_path, f"cat {tmp_path}/said")
    store = opened(endpoint="http://127.0.0.1:1", profile="helped")
    with pytest.raises(errors.NoCredentials) as caught:
        get_body(store)
    assert "hidden" not in str(caught.value)


def test_credentials_that_expire_are_refreshed_while_running(
    opened: Opener, server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A credential helper hands out tokens that are always about to expire."""
    counter = tmp_path / "count"
    helper = tmp_path / "helper.py"
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    said: dict[str, object] = {"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "SK"}
    said["Expiration"] = soon.isoformat()
    helper.write_text(
        "import json, pathlib\n"
        f"path = pathlib.Path({str(counter)!r})\n"
        "count = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(count))\n"
        f"said = {json.dumps(said)}\n"
        "print(json.dumps(said | {'SessionToken': f'token-{count}'}))\n"
    )
    helped(monkeypatch, tmp_path, f"{sys.executable} {helper}")
    store = opened(endpoint=server.endpoint, profile="helped")
    get_body(store)
    get_body(store)
    tokens = {re.search(rb"X-Amz-Security-Token=([^&]*)", head)[1] for head in server.heads}  # type: ignore[index]
    assert len(tokens) == 2


AHEAD_S = 720.0
"""So long before their end botocore asks for new ones already, but does not insist on them."""


@pytest.mark.parametrize(
    "later", [{"Expiration": LONG_AGO}, {"Expiration": "nonsense"}, {"Expiration": None}, []]
)
def test_a_helper_that_says_nonsense_ahead_of_need(
    opened: Opener,
    server: HostileServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    later: dict[str, str | None] | list[str],
) -> None:
    monkeypatch.setattr(credentials, "_AHEAD_PAUSE_S", 0.0)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=AHEAD_S)
    first = EXPIRED | {"Expiration": end.isoformat()}
    said = tmp_path / "said"
    said.write_text(json.dumps(first))
    helped(monkeypatch, tmp_path, f"cat {said}")
    asked, deleted = (opened(endpoint=server.endpoint, profile="helped") for _ in range(2))
    assert get_body(asked) == get_body(deleted) == BODY
    said.write_text(json.dumps(EXPIRED | later if isinstance(later, dict) else later))
    with contextlib.suppress(errors.NoCredentials):
        get_body(asked)
    with contextlib.suppress(errors.StoreError):
        deleted.delete([f"n{index}" for index in range(9)])
    said.write_text(json.dumps(first))
    assert get_body(asked) == get_body(deleted) == BODY


@pytest.mark.parametrize("left_s", [AHEAD_S, 300.0])
def test_who_hands_out_credentials_that_end_soon_is_not_asked_for_each_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float
) -> None:
    """Sessions of a quarter of an hour, or those that a helper keeps until shortly before their
    end: new ones end no later."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left_s)
    helper, asked = tmp_path / "helper", tmp_path / "asked"
    said = json.dumps(EXPIRED | {"Expiration": end.isoformat()})
    helper.write_text(f"#!/bin/sh\necho once >> {asked}\necho '{said}'\n")
    helper.chmod(0o700)
    helped(monkeypatch, tmp_path, str(helper))
    monkeypatch.setattr(credentials, "_AHEAD_PAUSE_S", math.inf)
    signer = credentials.CredentialChain("helped")
    signer.credentials(math.inf)
    at_first = asked.read_text()
    for _ in range(9):
        assert signer.credentials(math.inf).access_key == "A"
        while _somebody_asks():
            time.sleep(0.02)
    assert asked.read_text() == at_first
    monkeypatch.setattr(credentials, "_AHEAD_PAUSE_S", 0.0)
    signer.credentials(math.inf)
    while _somebody_asks():
        time.sleep(0.02)
    assert len(asked.read_text()) > len(at_first), "by and by"


def test_what_a_helper_says_that_fails_ahead_of_need_is_in_no_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(credentials, "_AHEAD_PAUSE_S", 0.0)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=AHEAD_S)
    helper, said = tmp_path / "helper", tmp_path / "said"
    helper.write_text(f"#!/bin/sh\ncat {said} || {{ echo hidden >&2; exit 1; }}\n")
    helper.chmod(0o700)
    said.write_text(json.dumps(EXPIRED | {"Expiration": end.isoformat()}))
    helped(monkeypatch, tmp_path, str(helper))
    signer = credentials.CredentialChain("helped")
    signer.credentials(math.inf)
    said.unlink()
    assert signer.credentials(math.inf).access_key == "A"
    while _somebody_asks():
        time.sleep(0.02)
    assert "Refreshing temporary credentials failed" in caplog.text
    assert "hidden" not in caplog.text


def _somebody_asks() -> bool:
    return any(thread.name == "kvtier-credentials" for thread in threading.enumerate())


def test_a_helper_that_hung_once_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(credentials, "_LOOKUP_S", 0.05)
    monkeypatch.setattr(credentials, "_HANGS_S", 0.05)
    hung = tmp_path / "hung"
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    said = tmp_path / "said"
    said.write_text(json.dumps(EXPIRED | {"Expiration": end.isoformat()}))
    os.mkfifo(hung)
    helper = tmp_path / "helper"
    helper.write_text(f"#!/bin/sh\n[ -p {hung} ] && cat {hung}\ncat {said}\n")
    helper.chmod(0o700)
    helped(monkeypatch, tmp_path, str(helper))
    signer = credentials.CredentialChain("helped")
    with pytest.raises(errors.NoCredentials, match="in time"):
        signer.credentials(math.inf)
    away = hung.rename(tmp_path / "away")
    monkeypatch.setattr(credentials, "_LOOKUP_S", 20.0)
    assert signer.credentials(math.inf).access_key == "A"
    while _somebody_asks():
        os.close(os.open(away, os.O_RDWR))
        time.sleep(0.02)


def test_credentials_stay_in_use_while_a_helper_that_hangs_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it said before is good for minutes more, however long it hangs ahead of need."""
    for name in ("_AHEAD_PAUSE_S", "_HANGS_S"):
        monkeypatch.setattr(credentials, name, 0.0)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=AHEAD_S)
    said = tmp_path / "said"
    said.write_text(json.dumps(EXPIRED | {"Expiration": end.isoformat()}))
    helped(monkeypatch, tmp_path, f"cat {said}")
    signer = credentials.CredentialChain("helped")
    signer.credentials(math.inf)
    while _somebody_asks():
        time.sleep(0.02)
    said.unlink()
    os.mkfifo(said)
    monkeypatch.setattr(credentials, "_LOOKUP_S", 0.05)
    try:
        assert [signer.credentials(math.inf).access_key for _ in range(4)] == ["A"] * 4
    finally:
        while _somebody_asks():
            os.close(os.open(said, os.O_RDWR))
            time.sleep(0.02)
