"""The object tier: a bucket, or a folder, that many servers share and that outlives them.

The tier answers from memory (`tier`). The handler moves blocks to and from the store
in the mover (`handler`). A keeper in a thread of its own does all other work in the store, and one
server's keeper hosts the caretaker. docs/how_it_works/object_store.md says what the tier promises,
docs/reference/format.md what lies in a store.

- `backend`: opens the tier and the handler, and checks settings
- `settings`: the settings of the tier, and the store that they name
- `tier`: stores and loads of one namespace, answered from memory
- `handler`: moves blocks between host memory and objects, compressed or not
- `budget`: how much this server may store, counted in memory
- `keeper`: the store work of one server, in a thread of its own
- `queues`: what passes between a tier and its keeper
- `lease`: who is the caretaker, and which servers live
- `caretaker`: keeps the budget for all: evicts, deletes, grants shares
- `audit`: everything that is listed against everything that is recorded
- `manifests`: the format of what servers record
- `journal`: reads and writes the manifests of a namespace
- `block_index`: what is recorded of a namespace, looked up by object
- `use_counts`: how often blocks were used, and which are retained
- `namespaces`: what lies below a url, and what is left of namespaces without a block
- `object_names`: the names of all objects below a url
- `writer_ids`: ids of servers, which show whether their process lives
- `gil_yield`: pauses of long work beside a busy thread
- `inspection/`: what commands do with a store
- `stores/`: one interface over all kinds of stores, and wrappers
"""

from __future__ import annotations

from kvtier.backends.object.backend import BACKEND, ObjectBackend
from kvtier.backends.object.handler import ObjectHandler, ObjectSpec
from kvtier.backends.object.settings import ObjectSettings, capacity_of, open_for
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
