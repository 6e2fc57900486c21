"""Stacks in folders of their own, and processes that use them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object import object_servers
from support.processes.cli_world import HOLDER, Hold, fill, install_example, stack_text


@pytest.fixture(autouse=True)
def hang_ups_end_processes() -> Iterator[None]:
    """Also where somebody runs the tests with nohup, which all of their processes would inherit."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


@pytest.fixture
def second_tier() -> str:
    """The kind of the second tier; tests that are for several kinds are parametrised with it."""
    return "nvme"


@pytest.fixture
def known_kind(
    second_tier: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Its package is installed."""
    if second_tier == "folder":
        install_example(tmp_path_factory.mktemp("example"), monkeypatch)
    return second_tier


@pytest.fixture
def stack_file(tmp_path: Path, known_kind: str) -> Path:
    """A stack of two tiers in which nothing has been stored yet."""
    host, blocks = tmp_path / "host", tmp_path / "disk" / "blocks"
    host.mkdir()
    blocks.parent.mkdir()
    path = tmp_path / "stack.yaml"
    path.write_text(stack_text(host, blocks, known_kind))
    return path


@pytest.fixture
def fresh(tmp_path: Path, known_kind: str) -> Path:
    """Another stack, with nothing in it."""
    folder = tmp_path / "fresh"
    (folder / "host").mkdir(parents=True)
    path = folder / "stack.yaml"
    path.write_text(stack_text(folder / "host", folder / "blocks", known_kind))
    return path


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Open a stack in another process, with blocks in it, until the test ends it or is over."""
    held: list[subprocess.Popen[str]] = []

    def start(path: Path, blocks: int = 8) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in held:
        process.communicate("go\n") if process.poll() is None else process.communicate()


@pytest.fixture
def filled(stack_file: Path) -> Path:
    """A stack with eight blocks in it that nobody uses."""
    fill(stack_file)
    return stack_file


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object_servers.ServerProcess]:
    """A store with a bucket named "bucket", and the credentials for it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_servers.SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with object_servers.rclone(tmp_path) as process:
        yield process
