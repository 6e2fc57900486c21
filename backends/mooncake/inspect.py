"""What can be known of a pool from outside: whether it answers, and what its master says of it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import msgspec

from kvtier import amounts
from kvtier.backends.mooncake.client import (
    MooncakeSettings,
    Pool,
    address_towards,
    store_module,
)
from kvtier.backends.mooncake.handler import DESCRIPTION
from kvtier.backends.mooncake.master import Master
from kvtier.backends.mooncake.tier import MooncakeSpec
from kvtier.errors import ExtraMissing, MediumError, Unsupported
from kvtier.inspect import Cleared, Depth, Finding, Inspector, Level, Part, Stored
from kvtier.inspect.filling import TAKE_ALL
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import KEY_BYTES_MAX, BlockKey, Namespace, Outcome

_NAME = re.compile(rf"([0-9a-f]{{32}})/((?:[0-9a-f][0-9a-f]){{1,{KEY_BYTES_MAX}}})")
_PROBE = "kvtier doctor"
"""A name under which nothing is stored."""


class MooncakeInspector(Inspector[MooncakeSettings]):
    """Clients can ask for names alone: what the pool holds is seen where its master answers over
    HTTP. Values carry no time, so blocks have no age."""

    def where(self) -> str:
        return f"the pool of {self.settings.master}"

    def listing(self) -> Iterator[Stored]:
        described = dict[str, Namespace | None]()
        for value in self._master().values(f"{self.settings.prefix}/"):
            if (found := _NAME.fullmatch(value.name, len(self.settings.prefix) + 1)) is None:
                continue
            name, key = found.groups()
            if name not in described:
                described[name] = self._described(name)
            if (namespace := described[name]) is not None:
                yield Stored(
                    namespace=namespace,
                    key=BlockKey(bytes.fromhex(key)),
                    bytes=value.bytes,
                    stored_at=0.0,
                    where=f"{value.name} at {value.where}",
                    at=MooncakeSpec([False]),
                )

    def _master(self) -> Master:
        if not self.settings.metrics:
            raise Unsupported(
                "clients of a Mooncake pool cannot list what it holds, but its master can: set "
                "metrics to where its --metrics_port is; where a command has --tier, that leaves "
                "this tier out"
            )
        return Master(self.settings.metrics)

    def _described(self, name: str) -> Namespace | None:
        """A namespace, from what its engines have written about it."""
        try:
            with closing(Pool(self.settings)) as pool:
                text = pool.read(f"{self.settings.prefix}/{name}/{DESCRIPTION}")
            namespace = Namespace.from_json(text)
            if namespace.id == name:
                return namespace
        except msgspec.ValidationError:
            pass
        self.contents.troubles.append(
            f"namespace {name}: the pool has blocks of it, and no longer what it is: an engine "
            "that stores there writes that again within ten minutes"
        )
        return None

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        super()._look(depth, uses_of)
        lent, contents = self._master().lent(), self.contents
        contents.capacity, contents.used = lent.capacity, lent.used
        contents.free = lent.capacity - lent.used

    def clear(self, part: Part) -> Iterable[Cleared]:
        def remove() -> None:
            with closing(Pool(self.settings)) as pool:
                pool.remove_all(f"{part.namespace}/")

        yield self.try_to_clear(part, remove)

    @contextmanager
    def measuring_place(self, room: int) -> Iterator[MooncakeSettings]:
        """Values with names of their own, in the same pool, which may evict others for them."""
        wanted = TAKE_ALL | {"capacity": Capacity(ByteSize(room)), "lends": ByteSize(0)}
        prefix = f"kvtier-bench-{secrets.token_hex(8)}"
        settings = msgspec.structs.replace(self.settings, **wanted, prefix=prefix)
        try:
            yield settings
        finally:
            with closing(Pool(settings)) as pool:
                pool.remove_all()

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
        if settings.metrics:
            yield self._lent(area)
        if settings.lends.bytes or settings.host:
            what = f"other machines reach this one as {address}"
            yield Finding(area, Level.NOTE, what, "set host if they know it by another address")
        if not settings.lends.bytes and settings.write is not WritePolicy.NEVER:
            what = "engines of this stack lend the pool no memory: other clients have to"
            yield Finding(
                area, Level.NOTE, what, "run mooncake_client on each machine, or set lends"
            )

    def _lent(self, area: str) -> Finding:
        try:
            lent = self._master().lent()
        except MediumError as error:
            return Finding(area, Level.BAD, str(error), "engines do without: only commands need it")
        used, capacity = amounts.size(lent.used), amounts.size(lent.capacity)
        what = f"the pool has {capacity} from {lent.machines} clients, and {used} of that are used"
        return Finding(area, Level.OK, what)

    def _asked(self, area: str) -> Iterator[Finding]:
        """As an engine asks, by a client that is closed again."""
        with closing(Pool(self.settings)) as pool:
            start = time.perf_counter()
            (outcome,) = pool.exist([_PROBE])
            took = amounts.duration(time.perf_counter() - start)
        if outcome is Outcome.GONE:
            yield Finding(area, Level.OK, f"{self.settings.master} answers within {took}")
        else:
            what = f"{self.settings.master} takes connections, and answers no question of a client"
            remedy = "look at its log, and whether its version fits the wheel that is installed"
            yield Finding(area, Level.BAD, what, remedy)
