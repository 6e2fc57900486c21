"""Work spread over this machine's cores: forked workers that share what was read before."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from kvtier.errors import KVTierError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

_READ_BYTES = 1 << 20
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spread(
    function: Callable[[Task], Answer], tasks: Sequence[Task], answer: type[Answer]
) -> Iterator[tuple[int, Answer]]:
    """The answer to each task with the task's number, as they come.

    Each task has a process of its own, as many at once as there are cores. They are forks, so that
    large inputs are there without a copy; what they answer comes back as msgpack. With threads
    running, or one core, everything is done here, one after the other.
    """
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or len(tasks) == 1 or threading.active_count() > 1:
        for number, task in enumerate(tasks):
            yield number, function(task)
        return
    gc.freeze()  # or the collector of each fork would touch, and so copy, all of it
    workers: dict[int, _Worker] = {}
    decoder = msgspec.msgpack.Decoder(answer)
    left = list(enumerate(tasks))[::-1]
    try:
        while left or workers:
            while left and len(workers) < cores:
                number, task = left.pop()
                with _signals_held():
                    worker = _Worker(number, partial(function, task))
                    workers[worker.pipe] = worker
            ready, _, _ = select.select(list(workers), [], [])
            for pipe in ready:
                if workers[pipe].read():
                    continue
                done = workers.pop(pipe)
                done.end()
                yield done.number, decoder.decode(done.text)
    finally:
        for worker in workers.values():
            os.kill(worker.pid, signal.SIGKILL)
            worker.close()
        gc.unfreeze()


@contextmanager
def _signals_held() -> Iterator[None]:
    """What ends a command waits for the end of the block: what a handler raises amid Python's own
    work after a fork is printed and lost, and a worker that nobody knows of would go on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A forked process that does one task."""

    def __init__(self, number: int, work: Callable[[], object]) -> None:
        self.number = number
        self.text = bytearray()
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _work(work, end)
        os.close(end)

    def read(self) -> bool:
        """Take in what it has said; false at the end."""
        piece = os.read(self.pipe, _READ_BYTES)
        self.text += piece
        return bool(piece)

    def end(self) -> None:
        """See it off; raises KVTierError if it did not answer."""
        status = self.close()
        if status:
            raise KVTierError(
                f"a worker process ended with status {status}: run it again with more free memory"
            )

    def close(self) -> int:
        """Wait for its end; the status."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _work(work: Callable[[], object], end: int) -> None:
    """The fork's whole life: nothing that the parent has begun is finished twice."""
    status = 1
    try:
        gc.disable()  # it lives for one task
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        with os.fdopen(end, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(work()))
        status = 0
    finally:
        os._exit(status)
