"""The object tier: a bucket, or a folder, that many servers share and that outlives them.

The tier answers from memory (`tier`, `catalogue`). The handler moves blocks to and from the store
in the mover (`handler`). A keeper in a thread of its own does all other work in the store
(`housekeeping/`). docs/how_it_works/object_store.md
says what the tier promises, docs/reference/format.md what lies in a store.

    backend        opens the tier and the handler, and checks settings
    settings       the settings of the tier, and the store that they name
    tier           stores and loads of one namespace, answered from memory
    catalogue      the blocks of one namespace, and how updates of the keeper change them
    handler        moves blocks between host memory and objects, compressed or not
    spec           where blocks are, as the tier tells the handler
    object_names   the names of all objects below a url
    writer_ids     ids of writers, which show whether their process lives
    lock_yield     pauses of long work beside a busy thread
    stores/        one interface over S3 and folders, and wrappers: retries, circuit breaker
    client/        the S3 client
    manifests/     what writers have recorded
    budget/        how writers share the capacity
    housekeeping/  what the keeper does in the store
"""

from __future__ import annotations

from kvtier.backends.object.backend import BACKEND, ObjectBackend
from kvtier.backends.object.handler import ObjectHandler
from kvtier.backends.object.settings import ObjectSettings, capacity_of, open_for
from kvtier.backends.object.spec import ObjectSpec
from kvtier.backends.object.tier import ObjectTier

__all__ = [
    "BACKEND",
    "ObjectBackend",
    "ObjectHandler",
    "ObjectSettings",
    "ObjectSpec",
    "ObjectTier",
    "capacity_of",
    "open_for",
]
