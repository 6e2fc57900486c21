"""The probe says what a store can do, and which setting is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_servers import ServerProcess

from kvtier.backends.object.files import FileStore
from kvtier.backends.object.probe import probe
from kvtier.backends.object.s3 import S3Settings, S3Store

ALL = ["put", "get", "range", "clock", "conditional put", "list", "delete"]


def test_a_good_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    steps = probe(store)
    assert [step.name for step in steps] == ALL
    assert all(step.ok and not step.note for step in steps)
    assert list(store.list()) == []


@pytest.mark.s3
def test_a_store_that_cannot_refuse_is_usable(rclone_server: ServerProcess) -> None:
    store = S3Store(S3Settings(bucket="bucket", prefix="probed", endpoint=rclone_server.endpoint))
    steps = {step.name: step for step in probe(store)}
    assert all(step.ok for step in steps.values())
    assert "no harm" in steps["conditional put"].note
    store.close()


@pytest.mark.s3
def test_a_wrong_secret_names_the_credentials(
    rclone_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = S3Store(S3Settings(bucket="bucket", endpoint=rclone_server.endpoint))
    (step,) = probe(store)
    assert not step.ok
    assert step.setting == "credentials"
    store.close()
