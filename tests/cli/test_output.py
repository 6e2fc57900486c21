"""Output that cannot go as it is: full disks, closed pipes, poor locales and terminals."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.cli_world import KVTIER, command

from kvtier.testing.subject import NAMESPACE, make_keys

pytestmark = pytest.mark.slow

KEY = make_keys(1)[0].hex()
MODEL = '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}'

ALL = [
    ["ls"],
    ["ls", NAMESPACE.id],
    ["du"],
    ["du", "--json"],
    ["ls", KEY],
    ["verify"],
    ["gc"],
    ["bench", "--chunk", "4KiB", "--blocks", "2", "--rounds", "1"],
    ["doctor", "--no-measure"],
    ["plan", "{model}", "--no-measure", "--bandwidth", "nvme=1GB/s"],
]
OTHERS = [
    ["--version"],
    ["--help"],
    ["ls", "--help"],
    ["config", "schema"],
]
every = pytest.mark.parametrize("words", [*ALL, *OTHERS], ids=lambda words: "-".join(words[:2]))


def called(words: list[str], stack: Path) -> list[str]:
    model = stack.with_name("model.json")
    model.write_text(MODEL)
    words = [word.format(model=model) for word in words]
    return [str(KVTIER), *words, *([] if words in OTHERS else ["-c", str(stack)])]


@every
def test_standard_output_on_a_full_disk(words: list[str], filled: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            called(words, filled), stdout=full, stderr=subprocess.PIPE, text=True, env=buffered()
        )
    said = "kvtier: standard output: No space left on device; free some room there\n"
    assert (done.returncode, done.stderr) == (1, said)


@every
def test_a_reader_that_has_gone(words: list[str], filled: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        called(words, filled), stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered()
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_what_a_locale_lacks(
    encoding: str, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are drawn with what there is; bytes of names that are no text are shown as such."""
    (tmp_path / "disk" / "blocks" / os.fsdecode(b"\xfe")).touch()
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = command("du", "-c", filled)
    assert done.code == 0
    assert "not kvtier's: \\xfe (1 in all)" in done.out
    assert ("█" in done.out) == encoding.startswith("utf")
    if encoding == "ascii":
        assert "#" in done.out
        assert "......" in done.out
    (nvme,) = json.loads(command("du", "-t", "nvme", "--json", "-c", filled).out)
    assert os.fsencode(nvme["strangers"][0]) == b"\xfe"


def test_a_name_of_two_lines_is_no_two_messages(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "blocks" / "x\nkvtier: all is well").touch()
    assert "\nkvtier" not in command("du", "-c", filled).out
    done = command("ls", "-c", tmp_path / "x\nkvtier: all is well")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(("kind", "moves"), [("dumb", False), ("xterm", True)])
def test_progress_on_a_terminal(kind: str, moves: bool, filled: Path) -> None:
    end, terminal = os.openpty()
    subprocess.run(
        [KVTIER, "verify", "-c", filled],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=os.environ | {"TERM": kind, "COLUMNS": "20"},
        check=True,
    )
    os.write(terminal, b"end")
    shown = b""
    while not shown.endswith(b"end"):
        shown += os.read(end, 1024)
    os.close(end)
    os.close(terminal)
    assert (b"\033" in shown) is moves
    assert all(len(line) < 20 for line in shown.decode().split("\r\033[K"))


def test_a_file_that_cannot_be_written_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "new"
    done = subprocess.run(
        [KVTIER, "config", "init", file, "--folder", f"{file}.blocks"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvtier: {file}: File too large; raise the limit: ulimit -f unlimited\n"
    assert not file.exists()


def test_python_runs_it_as_a_module_too(filled: Path) -> None:
    called = [sys.executable, "-m", "kvtier", "ls", "-c", str(filled)]
    done = subprocess.run(called, capture_output=True, text=True, check=True)
    assert NAMESPACE.id[:12] in done.stdout
    called[3] = "lss"
    done = subprocess.run(called, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Usage: kvtier [" in done.stderr


def test_a_folder_that_no_stack_file_can_name(tmp_path: Path) -> None:
    done = command("config", "init", tmp_path / "new", "--folder", os.fsdecode(b"/tmp/\xfe"))
    assert done.code == 2
    assert "--folder: /tmp/\\xfe is not UTF-8" in done.said
    assert not (tmp_path / "new").exists()


def buffered() -> dict[str, str]:
    """The environment in which Python writes what is printed as late as it does for most people."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
