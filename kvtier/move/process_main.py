"""The mover's process: `python -m kvtier.move.process_main FD PARENT`.

Only `ProcessMover` starts it.

One thread listens, one reports, and a `ThreadMover` does the work. The process ends when its parent
closes the socket or dies, whatever its handlers are doing at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from kvtier.errors import KVTierError, MoverError
from kvtier.interfaces.backend import backend
from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import TransferKind
from kvtier.move.protocol import (
    Cancel,
    Failed,
    Hasten,
    Hello,
    Inbox,
    Ready,
    Request,
    Submit,
    TransferEnded,
    frame,
    requests,
)
from kvtier.move.threads import ThreadMover
from kvtier.types import LoadStoreSpec

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 16
_REPORT_SECONDS = 1.0


def main() -> None:
    """Serve the parent until it goes."""
    end, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    with socket.socket(fileno=end) as parent_socket:
        parent_socket.set_inheritable(False)
        parent_socket.setblocking(True)
        with contextlib.suppress(ConnectionError):  # it died, and had not read all that we said
            serve(parent_socket)
    # Threads that hang in a handler must not keep the process.
    logging.shutdown()
    os._exit(0)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends.

    The end of the socket says the same, but not while a forked child of the parent keeps it open.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def stand_back() -> None:
    """Ask the kernel not to interrupt anyone for the sake of this thread. It would be the engine's
    scheduler, at the moment in which it has submitted a transfer; that has time."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def serve(parent: socket.socket) -> None:
    """Open what the parent names, then carry out what it submits."""
    inbox = Inbox()
    waiting: list[Request] = []
    while not waiting:
        data = parent.recv(_RECEIVE_BYTES)
        if not data:
            return
        waiting.extend(inbox.feed(data, requests))
    hello = waiting.pop(0)
    if not isinstance(hello, Hello):
        raise MoverError("the parent of a mover's process must say what to open first")
    logging.basicConfig(
        level=hello.log_level,
        stream=sys.stderr,
        format="%(asctime)s mover[%(process)d] %(levelname)s %(name)s: %(message)s",
    )
    try:
        handlers = open_handlers(hello)
    except (KVTierError, OSError, msgspec.ValidationError) as error:
        parent.sendall(frame(Failed(str(error))))
        return
    mover = ThreadMover(
        handlers,
        hello.context.namespace,
        staging_bytes=hello.staging_bytes,
        prefetch_share=hello.prefetch_share,
    )
    host = [isinstance(each, HostHandler) for each in handlers]
    calls = [each.call_seconds for each in handlers]
    longest = {TransferKind.FIND: calls, TransferKind.LOAD: calls}
    longest[TransferKind.STORE] = [each.store_seconds or each.call_seconds for each in handlers]
    parent.sendall(frame(Ready(host, longest)))
    reporter = ResultReporter(mover, parent)
    reporter.start()
    specs = [msgspec.msgpack.Decoder(backend(tier.kind).spec) for tier in hello.tiers]
    stand_back()
    listen(parent, inbox, mover, specs)
    mover.close()
    reporter.finish()


def open_handlers(hello: Hello) -> list[Handler]:
    """Open the data side of every tier."""
    return [backend(tier.kind).open_handler(tier.read(), hello.context) for tier in hello.tiers]


def listen(
    parent: socket.socket,
    inbox: Inbox,
    mover: ThreadMover,
    specs: list[msgspec.msgpack.Decoder[LoadStoreSpec]],
) -> None:
    """Hand what the parent asks for to the mover, until the parent has nothing more to say."""
    while data := parent.recv(_RECEIVE_BYTES):
        for request in inbox.feed(data, requests):
            if isinstance(request, Submit):
                mover.submit(request.read(specs))
            elif isinstance(request, Cancel):
                mover.cancel(request.ids)
            elif isinstance(request, Hasten):
                mover.hasten(request.ids)


class ResultReporter(threading.Thread):
    """Sends results as they come. A parent that does not read them makes only this thread wait."""

    def __init__(self, mover: ThreadMover, parent: socket.socket) -> None:
        super().__init__(name="kvtier-report", daemon=True)
        self._mover = mover
        self._parent = parent
        self._finishing = threading.Event()

    def run(self) -> None:
        while not self._finishing.is_set():
            self._mover.wait(_REPORT_SECONDS)
            self._report()
        self._report()

    def finish(self) -> None:
        """Send what is left and end."""
        self._finishing.set()
        self.join()

    def _report(self) -> None:
        results = self._mover.poll()
        if not results:
            return
        try:
            self._parent.sendall(frame(TransferEnded(results)))
        except OSError:
            self._finishing.set()  # the parent is gone; the listener hears it too


if __name__ == "__main__":
    main()
