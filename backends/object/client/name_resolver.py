"""What the name of a host stands for, with a limit to the wait: the system's own call has none.

Where no name server answers, that call takes half a minute, and several where a name is looked for
in many domains. A mover in which one call takes so long is held to hang, and is killed, with all
that it does for other tiers.
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
from kvtier.core.system.abandonable_calls import abandonable

_SHUN_S = 60.0

Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""As `socket.getaddrinfo` answers."""


class Resolver:
    """Asks once for each name at a time, however many wait for the answer: who has waited long
    enough leaves it to those who come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[Found]] = {}
        self._shunned: dict[Any, float] = {}
        """Addresses, and until when to try others of the same name before them."""

    def shun(self, where: object) -> None:
        """This address does not work: a machine has gone, say, or the way by IPv6 is broken."""
        now = time.monotonic()
        with self._lock:
            self._shunned = {one: end for one, end in self._shunned.items() if end > now}
            self._shunned[where] = now + _SHUN_S

    def find(self, host: str, port: int, seconds: float) -> Found:
        """All addresses, those last that are shunned: each may cost the time to connect. Raises
        StoreError, and what `socket.getaddrinfo` raises."""
        now, shunned = time.monotonic(), self._shunned
        found = self._find(host, port, seconds)
        return sorted(found, key=lambda one: max(now, shunned.get(one[4], now)))

    def _find(self, host: str, port: int, seconds: float) -> Found:
        name = host, port
        with self._lock:
            answer = self._asked.get(name)
            if answer is None or answer.done():
                answer = self._asked[name] = self._ask(host, port)
        try:
            return answer.result(seconds)
        except TimeoutError as error:
            raise TimedOut(f"no name server says what {host} stands for") from error

    def _ask(self, host: str, port: int) -> Future[Found]:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            return abandonable(ask, "kvtier-resolver")
        except RuntimeError as error:
            raise Unavailable(f"nobody can ask what {host} stands for: {error}") from error
