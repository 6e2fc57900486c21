"""What can be known of a pool from outside: whether it answers, and not what it holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvtier import amounts
from kvtier.backends.mooncake.client import (
    MooncakeSettings,
    Pool,
    address_towards,
    store_module,
)
from kvtier.errors import ExtraMissing, MediumError, Unsupported
from kvtier.inspect import Finding, Inspector, Level, Stored
from kvtier.inspect.filling import TAKE_ALL
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import Outcome

_PROBE = "kvtier doctor"
"""A name under which nothing is stored."""


class MooncakeInspector(Inspector[MooncakeSettings]):
    """Its clients can ask for names alone: nothing lists a pool, and so nobody clears it."""

    def where(self) -> str:
        return f"the pool of {self.settings.master}"

    def listing(self) -> Iterator[Stored]:
        raise Unsupported(
            "clients of a Mooncake pool cannot list what it holds: its master says how much that "
            "is (/metrics/summary at its --metrics_port), and an engine's /metrics what of it that "
            "engine knows; where a command has --tier, that leaves it out"
        )

    @contextmanager
    def measuring_place(self, room: int) -> Iterator[MooncakeSettings]:
        """Values with names of their own, in the same pool, which may evict others for them."""
        wanted = TAKE_ALL | {"capacity": Capacity(ByteSize(room)), "lends": ByteSize(0)}
        prefix = f"kvtier-bench-{secrets.token_hex(8)}"
        settings = msgspec.structs.replace(self.settings, **wanted, prefix=prefix)
        try:
            yield settings
        finally:
            pool = Pool(settings)
            pool.remove_all()
            pool.close()

    def checks(self) -> Iterator[Finding]:
        area, settings = self.area(), self.settings
        try:
            module = store_module()
        except (ExtraMissing, MediumError) as error:
            yield Finding(area, Level.BAD, str(error), "install it where engines run")
            return
        yield Finding(area, Level.OK, f"Mooncake is installed ({module.__file__})")
        try:
            address = settings.host or address_towards(settings.master)
        except OSError as error:
            what = f"nothing answers at {settings.master} ({error.strerror or error})"
            remedy = "start mooncake_master there: until then engines go on without this tier"
            yield Finding(area, Level.BAD, what, remedy)
            return
        yield from self._asked(area)
        if settings.lends.bytes or settings.host:
            what = f"other machines reach this one as {address}"
            yield Finding(area, Level.NOTE, what, "set host if they know it by another address")
        if not settings.lends.bytes and settings.write is not WritePolicy.NEVER:
            what = "engines of this stack lend the pool no memory: other clients have to"
            yield Finding(
                area, Level.NOTE, what, "run mooncake_client on each machine, or set lends"
            )

    def _asked(self, area: str) -> Iterator[Finding]:
        """As an engine asks, by a client that is closed again."""
        pool = Pool(self.settings)
        start = time.perf_counter()
        (outcome,) = pool.exist([_PROBE])
        took = amounts.duration(time.perf_counter() - start)
        pool.close()
        if outcome is Outcome.GONE:
            yield Finding(area, Level.OK, f"{self.settings.master} answers within {took}")
        else:
            what = f"{self.settings.master} takes connections, and answers no question of a client"
            remedy = "look at its log, and whether its version fits the wheel that is installed"
            yield Finding(area, Level.BAD, what, remedy)
