"""The demonstration runs as the README says, and shows what it claims."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


KVTIER = Path(sys.executable).with_name("kvtier")
DEMO = [str(KVTIER), "demo", "--tokens", "1500", "--layers", "2", "--hidden", "128"]


def test_the_cache_survives_a_kill_and_a_reboot() -> None:
    done = subprocess.run(
        DEMO, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    rows = {line.split("  ")[0]: line.split()[-4:] for line in done.stdout.splitlines()}
    assert rows["cold"][:2] == ["0", "0"]
    assert int(rows["after kill -9, a new start"][0]) >= 1280
    assert int(rows["after a reboot"][1]) >= 1280
    assert done.stdout.count("the same") == 5


def test_where_vllm_does_not_start_the_reason_is_kept(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "much"}
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Unable to configure handler" in done.stderr
    (log,) = tmp_path.glob("kvtier-demo-*.log")
    assert f"above is the end of its log, and {log} has all of it" in " ".join(done.stderr.split())
    assert "Unable to configure handler" in log.read_text()
    assert list(tmp_path.glob("kvtier-demo-*")) == [log]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_told_to_end_it_leaves_nothing(number: signal.Signals | None, tmp_path: Path) -> None:
    """By a signal, twice, or because the reader of what it says has gone. The folder of temporary
    files has a name that is too long for vLLM's sockets."""
    said = tmp_path / "said"
    temporary = tmp_path / ("temporary" * 10)
    temporary.mkdir()
    with (
        said.open("w") as errors,
        subprocess.Popen(
            DEMO,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=heed_all,
        ) as demo,
    ):
        assert demo.stdout is not None
        assert any("starting the server" in line for line in demo.stdout)
        (stack,) = temporary.glob("kvtier-demo-*/stack.yaml")
        region = Path(json.loads(stack.read_text())["tiers"][0]["path"])
        assert region.exists()
        if number is None:
            demo.stdout.close()
        else:
            demo.send_signal(number)
            demo.send_signal(number)
        assert demo.wait() == (141 if number is None else 128 + number), said.read_text()
    assert not region.exists()
    assert not list(temporary.glob("kvtier-demo-*"))
    assert not [words for words in running() if str(tmp_path) in words]


def heed_all() -> None:
    """A background job of a shell, in which tests may run, ignores some of these."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def running() -> Iterator[str]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_text(errors="replace")
