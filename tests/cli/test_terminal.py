"""A server that is run from a terminal, and what Ctrl-C, Ctrl-Z and a closed terminal do to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli import supervisor
from kvtier.vllm import server_process

KEEPER = """
import os, subprocess, sys
from kvtier.cli import supervisor
from kvtier.vllm import server_process
supervisor.REMIND_S, supervisor.LEFT_S = float(sys.argv.pop(1)), float(sys.argv.pop(1))
# As of a shell that has become this program.
before = subprocess.Popen(["sleep", "600"], start_new_session=True)
code = supervisor.run_server(sys.argv[1:], lambda: os.path.exists("/"))
assert before.poll() is None
before.kill()
sys.exit(code)
"""

# A server with an engine, which say what they hear. The first SIGTERM ends both, unless the server
# is a stubborn one. A careless one forgets its engine.
SERVER = """
import os, signal, subprocess, sys
name, path, how = sys.argv[1:]
def say(*words):
    with open(path, "a") as file:
        print(name, *words, file=file)
numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
if name == "server":
    engine = subprocess.Popen([sys.executable, __file__, "engine", path, how])
else:
    print("shown", flush=True)  # while there surely is a terminal
    say("up", os.getppid())
    say("is", os.getpid())
while True:
    number = signal.sigwait(numbers)
    say(signal.Signals(number).name)
    if name == "server" and number == signal.SIGTERM and how != "stubborn":
        if how == "obedient":
            engine.kill()
            engine.wait()
        os._exit(0)
"""


class Terminal:
    """A pseudo terminal in which somebody has started a server."""

    def __init__(
        self, folder: Path, how: str = "obedient", remind_s: float = 60, left_s: float = 60
    ) -> None:
        script, heard = folder / "server.py", folder / "heard"
        script.write_text(SERVER)
        os.mkfifo(heard)
        self._heard = os.fdopen(os.open(heard, os.O_RDWR), "r")
        self._end, other = os.openpty()

        def take() -> None:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)  # who runs the tests may ignore it
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        command = [sys.executable, str(script), "server", str(heard), how]
        self.keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(remind_s), str(left_s), *command],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=take,
        )
        os.close(other)
        self._group = int(self.next().removeprefix("engine up "))
        self.engine = int(self.next().removeprefix("engine is "))
        self._server = os.pidfd_open(self._group)

    def next(self) -> str:
        """What server or engine say next."""
        return self._heard.readline().rstrip()

    def shows(self, text: str) -> None:
        """Wait until the terminal shows this."""
        shown = ""
        while text not in shown:
            shown += os.read(self._end, 1024).decode()

    def type(self, key: bytes) -> None:
        os.write(self._end, key)

    def hang_up(self) -> None:
        os.close(self._end)
        self._end = -1

    def server_ended(self) -> None:
        """Wait until it has, whoever its parent is by now."""
        select.select([self._server], [], [])

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        os.close(self._server)
        self._heard.close()
        if self._end >= 0:
            self.hang_up()


NAMELESS = """
with open("/proc/self/comm", "wb", buffering=0) as name:
    name.write(bytes([0xE2, 0x82]))
print("named", flush=True)
input()
"""


def test_a_process_may_be_called_half_a_letter() -> None:
    """Linux cuts names after 15 bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", NAMELESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        assert process.pid in supervisor._children()
        assert process.pid in server_process._session(process.pid)
        process.communicate(b"\n")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(tmp_path)) as found:
        yield found


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(tmp_path, "stubborn")) as found:
        yield found


def test_what_the_server_prints_is_shown(terminal: Terminal) -> None:
    terminal.shows("shown")


def test_ctrl_c_tells_the_server_alone(terminal: Terminal) -> None:
    terminal.type(b"\x03")
    assert terminal.next() == "server SIGTERM"
    assert terminal.keeper.wait() == 130
    terminal.shows("closing (Ctrl-C again interrupts all of it, and once more kills it)")


def test_ctrl_c_again_and_again(stubborn: Terminal) -> None:
    """As without a keeper, all hear of the second; nothing survives the third."""
    stubborn.type(b"\x03")
    assert stubborn.next() == "server SIGTERM"
    stubborn.type(b"\x03")
    assert sorted((stubborn.next(), stubborn.next())) == ["engine SIGINT", "server SIGINT"]
    stubborn.type(b"\x03")
    stubborn.server_ended()
    assert stubborn.keeper.wait() == 130


def test_a_server_that_forgets_is_told_again(tmp_path: Path) -> None:
    with contextlib.closing(Terminal(tmp_path, "stubborn", remind_s=0.01)) as stubborn:
        stubborn.keeper.terminate()
        assert [stubborn.next() for _ in range(3)] == ["server SIGTERM"] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_keeper_that_is_told_to_end_closes_the_server(
    terminal: Terminal, number: signal.Signals
) -> None:
    terminal.keeper.send_signal(number)
    assert terminal.next() == "server SIGTERM"
    assert terminal.keeper.wait() == 0


def test_a_keeper_that_is_killed(terminal: Terminal) -> None:
    terminal.keeper.kill()
    assert terminal.next() == "server SIGTERM"
    terminal.server_ended()


def test_a_terminal_that_is_closed(terminal: Terminal) -> None:
    terminal.hang_up()
    assert terminal.next() == "server SIGTERM"
    assert terminal.keeper.wait() == 0


def test_ctrl_z_and_fg(terminal: Terminal) -> None:
    terminal.type(b"\x1a")
    _, status = os.waitpid(terminal.keeper.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    terminal.keeper.send_signal(signal.SIGCONT)
    assert sorted((terminal.next(), terminal.next())) == ["engine SIGCONT", "server SIGCONT"]
    terminal.type(b"\x03")
    assert terminal.next() == "server SIGTERM"
    assert terminal.keeper.wait() == 130


def test_an_engine_that_outlives_its_server_is_ended(tmp_path: Path) -> None:
    """As one of vLLM's that was still starting; this one does not heed the first call, too."""
    with contextlib.closing(Terminal(tmp_path, "careless", left_s=2.0)) as careless:
        engine = os.pidfd_open(careless.engine)
        careless.keeper.terminate()
        assert [careless.next(), careless.next()] == ["server SIGTERM", "engine SIGTERM"]
        assert careless.keeper.wait() == 0
        assert select.select([engine], [], [], 0)[0], "it had ended before its keeper did"
        os.close(engine)


def test_a_terminal_is_told_when_the_server_is_up(terminal: Terminal) -> None:
    terminal.shows("kvtier: the server is up, after ")
