"""What the demonstration starts, it ends; tests/vllm/test_demo.py sees what it shows."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from kvtier.vllm.server import Server

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
