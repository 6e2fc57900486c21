"""What the name of a host stands for, with a limit to the wait: the system's own call has none.

Where no name server answers, that call takes half a minute, and several where a name is looked for
in many domains. A mover in which one call takes so long is held to hang, and is killed, with all
that it does for other tiers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.backends.object.errors import TimedOut, Unavailable

Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""As `socket.getaddrinfo` answers."""


class Resolver:
    """Asks in threads of its own, once for each name at a time, however many wait for the answer:
    who has waited long enough leaves the thread behind, and the answer to those who come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[Found]] = {}

    def find(self, host: str, port: int, seconds: float) -> Found:
        """All addresses; raises StoreError, and what `socket.getaddrinfo` raises."""
        name = host, port
        with self._lock:
            answer = self._asked.get(name)
            if answer is None:
                answer = self._begin(name)
        try:
            return answer.result(seconds)
        except TimeoutError as error:
            raise TimedOut(f"no name server says what {host} stands for") from error

    def _begin(self, name: tuple[str, int]) -> Future[Found]:
        """Under the lock."""
        answer: Future[Found] = Future()
        asking = threading.Thread(
            target=self._ask, args=(name, answer), name="kvtier-resolver", daemon=True
        )
        try:
            asking.start()
        except RuntimeError as error:  # the system gives no more threads
            raise Unavailable(f"nobody can ask what {name[0]} stands for: {error}") from error
        self._asked[name] = answer
        return answer

    def _ask(self, name: tuple[str, int], answer: Future[Found]) -> None:
        try:
            answer.set_result(socket.getaddrinfo(*name, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        finally:
            with self._lock:
                del self._asked[name]
