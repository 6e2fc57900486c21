"""What a pool's master says over HTTP (its --metrics_port): the names of all values, their sizes,
and the machines that lend memory. Clients of the pool cannot ask for that.

Anybody may answer at that port, and anything: sizes are bounded, and types are checked.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from kvtier.errors import UNREADABLE, MediumError

_ANSWER_S = 30.0
"""Of a large pool the master counts all names."""
_ANSWER_BYTES = 1 << 30
_ASKED_AT_ONCE = 64
"""Names in one question, which is a line of HTTP."""


class PoolValue(NamedTuple):
    """What the pool has under a name."""

    name: str
    bytes: int
    where: str
    """The machine that has it, or one of them."""


class Lent(NamedTuple):
    """All memory of the pool."""

    used: int
    capacity: int
    machines: int


class _Replica(msgspec.Struct):
    size_: int
    transport_endpoint_: str = ""


class _Found(msgspec.Struct):
    ok: bool = False
    values: list[_Replica] | None = None


class _NamedValues(msgspec.Struct):
    data: dict[str, _Found] = {}


class _Segment(msgspec.Struct):
    allocator_used_bytes: int = 0
    allocator_capacity_bytes: int = 0


class _Segments(msgspec.Struct):
    segments: list[_Segment] = []


T = TypeVar("T")


class Master:
    """Asks it. Every method raises MediumError."""

    def __init__(self, address: str) -> None:
        self._address = address
        # As its clients reach it: no proxy stands between the machines of a pool.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def values(self, prefix: str) -> Iterator[PoolValue]:
        """The values whose names begin so, as far as they are in memory still."""
        text = self._ask("/get_all_keys").decode(errors="replace")
        names = iter(sorted(name for name in text.splitlines() if name.startswith(prefix)))
        while some := list(islice(names, _ASKED_AT_ONCE)):
            asked = ",".join(map(urllib.parse.quote, some))
            found = self._read(f"/batch_query_keys?keys={asked}", _NamedValues).data
            for name in some:
                copies = found[name].values if name in found else None
                if copies:
                    yield PoolValue(name, copies[0].size_, copies[0].transport_endpoint_)

    def lent(self) -> Lent:
        """What the machines lend, and how much of it is taken."""
        segments = self._read("/get_segments_detail", _Segments).segments
        used = sum(each.allocator_used_bytes for each in segments)
        return Lent(used, sum(each.allocator_capacity_bytes for each in segments), len(segments))

    def _read(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self._ask(path), type=kind)
        except UNREADABLE as error:
            raise MediumError(
                f"{self._address} answers what no master of Mooncake does ({error}): give metrics "
                "the address of its --metrics_port"
            ) from error

    def _ask(self, path: str) -> bytes:
        try:
            with self._opener.open(f"http://{self._address}{path}", timeout=_ANSWER_S) as answer:
                data: bytes = answer.read(_ANSWER_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise MediumError(
                f"the master does not say what its pool holds ({error}): see that it runs with "
                f"--metrics_port, and that {self._address} is reached from here"
            ) from error
        if len(data) > _ANSWER_BYTES:
            raise MediumError(f"{self._address} answers with more than {_ANSWER_BYTES} bytes")
        return data
