"""Host names, looked up with a limit to the wait. The system's own call has none.

Without a name server that call takes half a minute, and several where a name is looked up in many
domains. A mover in which one call takes so long is taken for hanging and is killed, with all that
it does for other tiers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvtier.backends.object.stores.errors import TimedOut, Unavailable
from kvtier.system.calls import abandonable

_AVOID_S = 60.0

Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""What `socket.getaddrinfo` returns."""


class Resolver:
    """Asks once at a time for each name. All callers wait for the same lookup; one whose time is
    over leaves, and the lookup goes on for those that come later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[tuple[str, int], Future[Found]] = {}
        self._avoided: dict[Any, float] = {}
        """Addresses that failed, and until when others of the same name are tried first."""

    def avoid(self, where: object) -> None:
        """This address does not work: its machine is gone, say, or the route by IPv6 is broken."""
        now = time.monotonic()
        with self._lock:
            self._avoided = {one: end for one, end in self._avoided.items() if end > now}
            self._avoided[where] = now + _AVOID_S

    def resolve(self, host: str, port: int, seconds: float) -> Found:
        """All addresses of a name. Those to avoid come last, because each may cost the time to
        connect. Raises StoreError, and what `socket.getaddrinfo` raises."""
        now, avoided = time.monotonic(), self._avoided
        found = self._look_up(host, port, seconds)
        return sorted(found, key=lambda one: max(now, avoided.get(one[4], now)))

    def _look_up(self, host: str, port: int, seconds: float) -> Found:
        name = host, port
        with self._lock:
            lookup = self._lookups.get(name)
            if lookup is None or lookup.done():
                lookup = self._lookups[name] = _start_lookup(host, port)
        try:
            return lookup.result(seconds)
        except TimeoutError as error:
            raise TimedOut(f"no name server says what {host} stands for") from error


def _start_lookup(host: str, port: int) -> Future[Found]:
    call = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return abandonable(call, "kvtier-resolver")
    except RuntimeError as error:
        raise Unavailable(f"nobody can ask what {host} stands for: {error}") from error
