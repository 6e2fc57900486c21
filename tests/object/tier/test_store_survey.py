"""A look at a store, as commands take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.object.inspection.store_survey import StoreSurvey
from kvtier.backends.object.object_names import block_name, description_name
from kvtier.backends.object.stores.errors import TimedOut
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer
from kvtier.inspect import Contents, Depth
from kvtier.testing.subject import make_keys, sealed
from kvtier.types import Namespace

NAMESPACES = [Namespace(facts={"model": str(n)}, group_bytes=(4096,)) for n in range(4)]


class HangingStore(FileStore):
    """It lists, and never returns an object."""

    gets = 0

    def get(self, name: str, into: Buffer, **more: Any) -> int | None:
        self.gets += 1
        raise TimedOut(f"{name} did not come in time")


@pytest.mark.parametrize("depth", [Depth.NAMES, Depth.COUNTED])
def test_a_store_that_hangs_is_waited_for_once(tmp_path: Path, depth: Depth) -> None:
    store = HangingStore(tmp_path / "store")
    (key,) = make_keys(1)
    for each in NAMESPACES:
        store.put(block_name(each.id, key), [sealed(key, each)])
        store.put(description_name(each.id), [memoryview(each.to_json())])
    found = Contents()
    with pytest.raises(TimedOut):
        StoreSurvey(contents=found).look(store, depth)
    assert store.gets == 1
    assert {part.namespace for part in found.parts} == {each.id for each in NAMESPACES}
