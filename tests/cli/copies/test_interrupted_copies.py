"""Copies that end before their time, killed or interrupted, and are run again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.object import object_servers
from support.processes.cli_world import KVTIER, STACK, Hold, command, run

from kvtier.cli.inspect import look
from kvtier.config import load
from kvtier.slab.layout import RESERVED
from kvtier.testing.subject import NAMESPACE

pytestmark = pytest.mark.slow

BLOCKS = 600
RATE = "2MB/s"
"""Of 8 KiB blocks: all of them take seconds, and a piece of them a tenth of a second."""

# The command line, but that a copy stops after so many bytes until a file is there.
HELD = """
import sys, time
from pathlib import Path
from kvtier.cli import main
from kvtier.cli.sink import RateLimit
going_on, left = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
spend = RateLimit.spend
def spend_or_wait(pace, size):
    global left
    left -= size
    while left < 0 and not going_on.exists():
        time.sleep(0.01)
    spend(pace, size)
RateLimit.spend = spend_or_wait
main.main()
"""


@pytest.fixture(params=["folder", "rclone"])
def stack(request: pytest.FixtureRequest, tmp_path: Path, hold: Hold) -> Path:
    """A stack whose store alone holds the blocks."""
    (tmp_path / "host").mkdir()
    text = STACK.format(host=tmp_path / "host", blocks=tmp_path / "blocks")
    if request.param == "folder":
        store = f'url: "file://{tmp_path}/store"'
    else:
        store = f'url: "s3://bucket/kv", endpoint: "{request.getfixturevalue("server").endpoint}"'
    path = tmp_path / "stack.yaml"
    path.write_text(f"{text}  - {{kind: object, capacity: 64MiB, {store}}}\n")
    path.write_text(path.read_text().replace("4MiB", "64MiB").replace("16MiB", "64MiB"))
    hold(path, BLOCKS).communicate("go\n")
    for tier in ("cpu", "nvme"):
        command("clear", "-c", path, "--tier", tier, "--yes")
    assert arrived(path) == 0
    return path


def arrived(stack: Path) -> int:
    """How many blocks are there for anybody to see."""
    (nvme,) = look(load(stack), 1)
    return sum(part.blocks for part in nvme.contents.parts)


def start(stack: Path, known: int = 0) -> subprocess.Popen[str]:
    """It waits for `going_on` when two thirds of what is missing are on their way."""
    most = (BLOCKS - known) * 2 // 3 * NAMESPACE.payload_bytes
    args = ["prewarm", "-c", stack, "--rate", RATE, "--json"]
    return subprocess.Popen(
        [sys.executable, "-c", HELD, going_on(stack), str(most), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has its background jobs ignore Ctrl-C, and with them the tests that run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def going_on(stack: Path) -> Path:
    return stack.with_name("go on")


def let_arrive(process: subprocess.Popen[str], stack: Path, blocks: int) -> None:
    while arrived(stack) < blocks:
        assert process.poll() is None, process.communicate()


def finishes(stack: Path, known: int) -> None:
    """Run again, it copies what is missing and no more; everything is right, nothing is left."""
    (report,) = run("prewarm", "-c", stack)["namespaces"]
    assert report["already_there"] >= known
    assert report["copied"] + report["already_there"] == report["asked"] == BLOCKS
    counts = run("verify", "-c", stack, "--tier", "nvme")["counts"]
    assert counts["good"] == BLOCKS == sum(counts.values())
    assert not list((stack.parent / "blocks").rglob("*.making"))


def test_killed_at_random(stack: Path) -> None:
    chance = random.Random(7)
    known = 0
    for _ in range(4):
        process = start(stack, known)
        let_arrive(process, stack, known + chance.randrange(1, (BLOCKS - known) // 3))
        process.kill()
        process.communicate()
        now = arrived(stack)
        assert known <= now < BLOCKS, "what has arrived stays"
        known = now
    finishes(stack, known)


@pytest.mark.parametrize(
    ("blocks", "number"), [(1, signal.SIGINT), (200, signal.SIGINT), (200, signal.SIGTERM)]
)
def test_interrupted(stack: Path, blocks: int, number: int) -> None:
    process = start(stack)
    let_arrive(process, stack, blocks)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f"kvtier: interrupted: {arrived(stack)} blocks" in said
    assert "run it again" in said
    assert len(said.splitlines()) == 1
    (nvme,) = look(load(stack), 1)
    assert not nvme.contents.troubles
    assert all((slab.entries()["state"] != RESERVED).all() for slab in nvme.slabs)
    assert not any(slab.in_use for slab in nvme.slabs)
    finishes(stack, arrived(stack))


@pytest.mark.parametrize("stack", ["rclone"], indirect=True)
def test_the_store_goes_away(stack: Path, server: object_servers.ServerProcess) -> None:
    process = start(stack)
    let_arrive(process, stack, 100)
    server.kill()
    going_on(stack).touch()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    (report,) = json.loads(out)["namespaces"]
    assert report["unread"] == BLOCKS - report["copied"] > 0 == report["bad"]
    server.start()
    finishes(stack, report["copied"])


@pytest.mark.parametrize("stack", ["folder"], indirect=True)
def test_two_at_once_copy_each_block_once(stack: Path) -> None:
    first = start(stack)
    let_arrive(first, stack, 1)
    second = subprocess.Popen(
        [KVTIER, "prewarm", "-c", stack, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert second.stderr is not None
    assert "another command is filling" in second.stderr.readline()
    going_on(stack).touch()
    reports = [json.loads(each.communicate(timeout=300)[0]) for each in (first, second)]
    assert [report["namespaces"][0]["copied"] for report in reports] == [BLOCKS, 0]
    assert arrived(stack) == BLOCKS


@pytest.mark.parametrize("stack", ["folder"], indirect=True)
def test_who_waits_for_another_can_be_interrupted(stack: Path) -> None:
    first = start(stack)
    let_arrive(first, stack, 1)
    second = subprocess.Popen([KVTIER, "prewarm", "-c", stack], stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    assert "another command is filling" in second.stderr.readline()
    second.terminate()
    second.communicate(timeout=300)
    assert second.returncode == 128 + signal.SIGTERM
    first.kill()
    first.communicate()
    finishes(stack, 1)


# The command line, but that it takes a stopped command for stopped as soon as it sees it.
AT_ONCE = (
    "from kvtier.slab import folder_inspect; folder_inspect._STOPPED_S = 0.0; "
    "from kvtier.cli import main; main.main()"
)


@pytest.mark.parametrize("stack", ["folder"], indirect=True)
def test_nobody_waits_for_a_command_that_is_stopped(stack: Path) -> None:
    first = start(stack)
    let_arrive(first, stack, 1)
    first.send_signal(signal.SIGSTOP)
    words = [sys.executable, "-c", AT_ONCE, "prewarm", "-c", str(stack)]
    second = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert second.returncode == 1
    assert f"kill -CONT {first.pid}" in " ".join(second.stderr.split())
    first.send_signal(signal.SIGCONT)
    going_on(stack).touch()
    (report,) = json.loads(first.communicate(timeout=300)[0])["namespaces"]
    assert report["copied"] == BLOCKS
