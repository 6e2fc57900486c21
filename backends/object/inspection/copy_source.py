"""The blocks that manifests name, as a copy reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.manifests.manifest import Entries
from kvtier.backends.object.spec import ObjectSpec
from kvtier.inspect.filling import ROW, HandlerSource, Rows
from kvtier.interfaces.handler import Handler
from kvtier.types import LoadStoreSpec, Namespace

Counts = npt.NDArray[np.uint32]


class ManifestSource(HandlerSource):
    """Blocks of one namespace in a store. `at` is a block's generation."""

    def __init__(
        self,
        tier: int,
        kind: str,
        open_handler: Callable[[Namespace], Handler],
        entries: Entries,
        uses: tuple[Counts, Counts] | None,
        *,
        waits: bool,
    ) -> None:
        super().__init__(tier, kind, open_handler)
        self._entries = entries
        self._uses = uses
        self.waits = waits

    def rows(self) -> Rows:
        entries = self._entries
        rows = np.zeros(len(entries), ROW)
        rows["key"], rows["key_bytes"] = entries["key"], entries["key_bytes"]
        rows["at"], rows["bytes"] = entries["generation"], entries["size"]
        rows["stored_at"] = entries["time_us"] / 1e6
        if self._uses is not None:
            rows["uses"], rows["used_at"] = self._uses
        return rows

    def spec(self, at: Sequence[int]) -> LoadStoreSpec:
        return ObjectSpec(list(at))
