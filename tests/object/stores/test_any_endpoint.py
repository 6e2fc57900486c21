"""Conformance of any S3 endpoint: set KVTIER_TEST_ENDPOINT, and credentials as AWS tools take them.

    KVTIER_TEST_ENDPOINT=https://... KVTIER_TEST_BUCKET=scratch \\
        pytest tests/object/stores/test_any_endpoint.py

Without an endpoint this file is not collected. Everything is written below a prefix of its own.
`tests/object/radosgw.sh` starts a Ceph gateway.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.object.object_subjects import BucketSubject
from support.object.store_contract import StoreContract

from kvtier.backends.object.stores.bucket_store import BucketStore
from kvtier.backends.object.stores.clouds import BucketSettings, Timeouts
from kvtier.backends.object.stores.store import PutOutcome, Store
from kvtier.testing.contract import TierContract

ENDPOINT = os.environ.get("KVTIER_TEST_ENDPOINT", "")
BUCKET = os.environ.get("KVTIER_TEST_BUCKET", "bucket")
RUN = secrets.token_hex(4)

pytestmark = pytest.mark.s3
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def credentials() -> None:
    """Here they are the caller's own."""


def open_prefix() -> BucketStore:
    return BucketStore(
        BucketSettings(
            bucket=BUCKET,
            prefix=f"kvtier-test-{RUN}/{next(_numbers)}",
            endpoint=ENDPOINT,
            timeouts=Timeouts(5.0, 30.0, 60.0),
        )
    )


@pytest.fixture(scope="session")
def refuses() -> bool:
    store = open_prefix()
    view = memoryview(b"x")
    store.put("once", [view])
    outcome = store.put("once", [view], if_absent=True)
    store.close()
    return outcome is PutOutcome.ALREADY_THERE


class TestStore(StoreContract):
    @pytest.fixture
    def store(self, refuses: bool) -> Iterator[Store]:
        type(self).can_refuse = refuses
        store = open_prefix()
        yield store
        store.delete([info.name for info in store.list()])
        store.close()

    def test_more_than_a_page(self, store: Store) -> None:
        names = [f"page/{index:04d}" for index in range(1100)]
        with ThreadPoolExecutor(16) as writers:
            list(writers.map(lambda name: store.put(name, [memoryview(b"x")]), names))
        assert [info.name for info in store.list("page/")] == names
        assert [info.name for info in store.list("page/", after=names[49])] == names[50:]
        assert store.delete(names[:-1]) == {}
        assert [info.name for info in store.list("page/")] == names[-1:]


class TestTier(TierContract):
    subject = BucketSubject(ENDPOINT, BUCKET)
