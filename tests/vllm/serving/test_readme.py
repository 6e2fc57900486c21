"""A newcomer's walk: the README's own blocks, one after the other, in a copy of the project.

From nothing to a hit after a restart, and to a second, empty folder that is filled from a bucket
and whose first request hits. Only the port is another one than the page says.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.object import object_servers
from support.processes.sources import copy_sources

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(
    r"^<!-- run by tests/vllm/serving/test_readme.py -->\n```sh\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
ANSWER = re.compile(r"^prompt (\d): (\d+) tokens, (\d+) cached \((.*)\), ", re.MULTILINE)
CHUNK = 256


def clone(target: Path) -> None:
    """The project's files, and the environment that the tests run in where it makes its own."""
    copy_sources(target)
    environment = target / ".venv-vllm"
    environment.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".ready-"):
            (environment / path.name).symlink_to(path)
    stamp = subprocess.run(
        ["make", "--eval", "which: ; @echo $(VLLM_STAMP)", "which"],
        # as if by hand, though make may run these tests: one inside another says more
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        cwd=target,
        check=True,
        capture_output=True,
        text=True,
    )
    (target / stamp.stdout.strip()).touch()


def read_script() -> str:
    """All that the page says to type."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) == 4
    return "\n".join(["set -eu", *blocks]).replace("8000", str(object_servers.free_port()))


def test_the_readme_leads_to_a_second_machine(tmp_path: Path) -> None:
    walk(read_script(), tmp_path)


def walk(script: str, tmp_path: Path) -> None:
    """Run it all where nothing is there yet, and hold its answers to what the page promises."""
    home, project = tmp_path / "home", tmp_path / "kvtier"
    home.mkdir()
    project.mkdir()
    clone(project)
    for name in ("first", "second"):  # regions of shared memory are named after the engine
        script = re.sub(rf"--name {name}\b", f"--name walk-{os.getpid()}-{name}", script)
    kept = {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}
    uncompiled = {"VLLM_CPU_CI_ENV": "1"}  # compiling is vLLM's own, and takes half of a start
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=project,
        env={"HOME": str(home)}
        | {key: os.environ[key] for key in kept & os.environ.keys()}
        | uncompiled,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    logs = "".join(path.read_text()[-3000:] for path in sorted(project.glob("*.log")))
    assert process.returncode == 0, output + logs
    cold, restarted, second = check_answers(output)
    assert {hit for _, hit in cold} == {"none from kvtier"}
    for found, tier in ((restarted, "cpu"), (second, "cpu")):
        for tokens, hit in found:
            assert hit == f"{(tokens - 1) // CHUNK} blocks from {tier}", output
    roots = Path("/dev/shm").glob(f"*walk-{os.getpid()}-*")
    left = {path.name for root in roots for path in root.rglob("*")}
    assert left <= {"lock"}, "its end frees the memory, but for a lock that engines share"


def check_answers(output: str) -> list[list[tuple[int, str]]]:
    """What was said of both prompts, three times: its tokens, and where its blocks came from."""
    found = ANSWER.findall(output)
    assert len(found) == 6, output
    for _, tokens, cached, hit in found:
        blocks = 0 if hit == "none from kvtier" else (int(tokens) - 1) // CHUNK
        assert int(cached) == blocks * CHUNK, output
    said = [(int(tokens), hit) for _, tokens, _, hit in found]
    return [said[0:2], said[2:4], said[4:6]]
