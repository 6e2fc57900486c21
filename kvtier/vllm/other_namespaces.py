"""Which blocks lie under other namespaces of the same model, on the media of this machine.

The same tokens have the same key in each of them, if chunk size and hash are the same: so a prompt
that misses here may be found there, and the facts in which the two differ are why. A thread looks
now and then, and reads no more than so many keys of each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import numpy as np

from kvtier.chain.misses import Hashes, hashes_of
from kvtier.config import StackConfig
from kvtier.inspect import Depth, Inspector, InspectorContext, Reach
from kvtier.interfaces.backend import backend
from kvtier.system.calls import Attempt, joined
from kvtier.types import BlockKey, Namespace

logger = logging.getLogger(__name__)

EVERY_S = 600.0
_NAMESPACES_MAX, _KEYS_MAX = 8, 1 << 16
_PIECE, _PAUSE_S = 256, 0.001
"""After so many keys the thread lets go of the GIL: requests are served meanwhile."""
_FACTS_TOLD = 3
_CLOSE_S = 1.0


class OtherNamespaces:
    """Knows keys of namespaces that an engine cannot use."""

    def __init__(self, config: StackConfig, namespace: Namespace) -> None:
        self._config = config
        self._namespace = namespace
        self._keys: list[tuple[str, Hashes]] = []
        """With the facts that differ; the hashes ascend."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look now, and then now and then."""
        self._thread = threading.Thread(target=self._run, name="kvtier-namespaces", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            with Attempt("other namespaces could not be looked at"):
                self.look()
            self._closed.wait(EVERY_S)

    def look(self) -> None:
        """Read what there is. May block: never on a scheduler's thread."""
        found: dict[str, list[Hashes]] = {}
        for inspector in self._inspectors():
            others = inspector.look(Depth.NAMES).namespaces.values()
            alike = (each for each in others if each.model == self._namespace.model)
            for other in islice(alike, _NAMESPACES_MAX):
                if facts := self._differences(other):
                    found.setdefault(facts, []).append(self._read(inspector, other))
        self._keys = [(facts, np.sort(np.concatenate(keys))) for facts, keys in found.items()]

    def _inspectors(self) -> Iterator[Inspector[Any]]:
        for tier, settings in enumerate(self._config.tiers):
            context = InspectorContext(tier, self._config.name)
            inspector = backend(settings.kind).open_inspector(settings, context)
            if inspector.reach is not Reach.SHARED:
                yield inspector

    def _differences(self, other: Namespace) -> str:
        """Empty, if it is our own."""
        differ = self._namespace.differences(other)
        more = [f"and {len(differ) - _FACTS_TOLD} more"] if len(differ) > _FACTS_TOLD else []
        return ", ".join([*map(str, differ[:_FACTS_TOLD]), *more])

    def _read(self, inspector: Inspector[Any], namespace: Namespace) -> Hashes:
        """The hashes of its keys: the first so many."""
        keys = (block.key for block in islice(inspector.blocks(namespace.id), _KEYS_MAX))
        pieces = [np.empty(0, np.uint64)]
        while not self._closed.wait(_PAUSE_S) and (some := list(islice(keys, _PIECE))):
            pieces.append(hashes_of(some))
        return np.concatenate(pieces)

    def find(self, keys: Collection[BlockKey]) -> str | None:
        """The facts of a namespace that has one of these blocks, if there is one."""
        known_ones = self._keys
        wanted = hashes_of(keys if known_ones else ())
        for facts, known in known_ones:
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            if len(known) and np.any(known[at] == wanted):
                return facts
        return None

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread is not None:
            joined([self._thread], _CLOSE_S)
