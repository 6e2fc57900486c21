"""A handler in a process that knows settings and context alone, as that of the mover does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from kvtier.interfaces.backend import TierContext, backend
from kvtier.move.protocol import TierOpening
from kvtier.settings import TierSettings
from kvtier.testing.subject import blank, prove
from kvtier.types import BlockKey, LoadStoreSpec, Outcome


class Question(msgspec.Struct):
    """What to open, and what to load there."""

    opening: TierOpening
    context: TierContext
    spec: msgspec.Raw
    keys: list[BlockKey]


def load_elsewhere(
    settings: TierSettings, context: TierContext, spec: LoadStoreSpec, keys: Sequence[BlockKey]
) -> list[Outcome]:
    """Load pinned keys, at most as many as one call may have, and prove them, in a new process."""
    opening, place = TierOpening.of(settings), msgspec.Raw(msgspec.msgpack.encode(spec))
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=msgspec.msgpack.encode(Question(opening, context, place, list(keys))),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.msgpack.decode(done.stdout, type=list[Outcome])


def main() -> None:
    """Answer a question from stdin."""
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    found, namespace = backend(asked.opening.kind), asked.context.namespace
    handler = found.open_handler(asked.opening.read(), asked.context)
    records = [blank(namespace) for _ in asked.keys]
    spec = msgspec.msgpack.decode(asked.spec, type=found.spec)
    outcomes = handler.load(spec, asked.keys, records)
    for index, (key, record) in enumerate(zip(asked.keys, records, strict=True)):
        if outcomes[index].ok:
            outcomes[index] = prove(record, key, namespace)
    handler.close()
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
