"""What the demonstration starts, it ends; tests/vllm/serving/test_demo.py sees what it shows."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.signals import ENDING
from kvtier.vllm.server_process import Server

# Like vLLM's: shared memory and a semaphore that have names, and a child that has them, too.
ENGINE = """
import multiprocessing
import signal
from multiprocessing.shared_memory import SharedMemory

def stay(memory, lock):
    print(memory.name, lock._semlock.name, flush=True)
    signal.pause()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    memory, lock = SharedMemory(create=True, size=4096), context.Lock()
    child = context.Process(target=stay, args=(memory, lock))
    child.start()
    child.join()
"""


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        memory, lock = process.stdout.readline().decode().split()
        made = [Path(f"/dev/shm/{memory}"), Path(f"/dev/shm/sem.{lock.removeprefix('/')}")]
        assert all(each.exists() for each in made)
        Server(process, socket.socket(), tmp_path / "log").kill()
        assert not process.stdout.read(), "its child has ended, too"
    assert not any(each.exists() for each in made)


DEAF = """
import contextlib, os, signal, sys
from kvtier.cli.demo import _ending_in_order

class Finalizer:
    def __del__(self):
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            signal.pause()
        except SystemExit:  # as Python does, where it can only print it, and sometimes does not
            pass

with _ending_in_order():
    try:
        Finalizer()
        print("goes on", flush=True)
        while True:
            signal.pause()
    finally:
        while signal.getitimer(signal.ITIMER_REAL)[0]:
            with contextlib.suppress(OSError):
                open("/nowhere")
        print("tidied up", flush=True)
"""


@pytest.mark.parametrize("number", ENDING)
def test_it_ends_also_where_the_exception_is_dropped(number: signal.Signals) -> None:
    """And nothing comes between while it tidies up."""
    done = subprocess.run(
        [sys.executable, "-c", DEAF, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (128 + number, "goes on\ntidied up\n"), done.stderr
