"""A store that people, not engines, use: its errors say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kvtier.backends.object.settings import ObjectSettings, open_for
from kvtier.backends.object.stores.errors import StoreError, TransientError
from kvtier.backends.object.stores.open_store import parse_url
from kvtier.backends.object.stores.store import Store
from kvtier.errors import MediumError


@contextmanager
def opened_store(settings: ObjectSettings) -> Iterator[Store]:
    """Raises MediumError for all that the store raises, here and in the block."""
    try:
        with closing(open_for(settings)) as store:
            yield store
    except StoreError as error:
        raise MediumError(down(error)) from error


def down(error: StoreError) -> str:
    """What a store said, and where to look."""
    look = "see that the store is running, and kvtier doctor"
    return f"{error}; {look if isinstance(error, TransientError) else 'see kvtier doctor'}"


def local_folder(url: str) -> Path | None:
    """The folder of a file:// url, None for any other text."""
    with suppress(StoreError):
        return parse_url(url).folder
    return None
