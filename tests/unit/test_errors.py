"""Errors go where their callers are: into another process, too."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvtier.backends.object.stores.errors import RateLimited
from kvtier.errors import (
    ConfigError,
    ConfigErrors,
    ExtraMissing,
    KVTierError,
    MediumError,
    NotWritable,
)

ONE = ConfigError("$.tiers[0]", "is wrong", "mend it", "stack.yaml:7:5")
ERRORS = [
    ONE,
    ConfigErrors([ONE, ConfigError("$.name", "is wrong")]),
    NotWritable(".path", "no right to write", "change its owner"),
    ExtraMissing("an object store", "s3"),
    MediumError("no room"),
    RateLimited("slow down"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_reaches_another_process_as_it_is(error: KVTierError) -> None:
    """A pool of processes waits for ever for an error that it cannot read."""
    crossed = pickle.loads(pickle.dumps(error))  # noqa: S301 - it was made here
    for there in (crossed, copy.copy(error)):
        assert type(there) is type(error)
        assert str(there) == str(error)
        assert there.args == error.args
        assert there.__dict__.keys() == error.__dict__.keys()
        if isinstance(error, ConfigErrors):
            assert [str(each) for each in there.errors] == [str(each) for each in error.errors]
