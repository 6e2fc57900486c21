"""Calls that cannot be meant: each is refused by the name of its option, and nothing is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.cli_world import KVTIER, command

from kvtier.cli import app
from kvtier.testing.subject import NAMESPACE

pytestmark = pytest.mark.slow

MODEL = '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}'
FLEETING = """\
version: 1
tiers:
  - {{kind: cpu, path: "{folder}/host", capacity: 4MiB}}
  - {{kind: nvme, path: "{folder}/f", capacity: 16MiB, free_floor: 0, persistence: discard}}
  - {{kind: memory, capacity: 4MiB}}
  - {{kind: object, url: "file://{folder}/one", capacity: 16MiB}}
  - {{kind: object, url: "file://{folder}/two", capacity: 16MiB}}
"""
WRONG = [
    (f"ls --tier {'1' * 5000} -c {{stack}}", 2, "is not one tier of 0 cpu, 1 nvme"),
    ("snapshot --size 0 -c {stack}", 2, "'--size': a size of nothing"),
    ("prewarm --rate 200 -c {stack}", 2, "'--rate': '200' is no rate; write one like 200MB/s"),
    ("snapshot --rate 5MB/h -c {stack}", 2, "'--rate': '5MB/h' is no rate; write one like 200MB/s"),
    ("snapshot --to file://{folder} --size 1 -c {stack}", 1, "1 B hold not one block, which"),
    ("bench --chunk 5GiB -c {stack}", 2, "'--chunk': '5GiB' is more than the 4GiB of a block"),
    ("config check {stack} --block-size 5GiB", 2, "--block-size: '5GiB' is more than the 4GiB"),
    ("verify --sample 150% -c {stack}", 2, "'--sample': '150%': write a number"),
    ("verify --sample 0 -c {stack}", 2, "'--sample': '0': write a number"),
    ("verify --sample nan% -c {stack}", 2, "'--sample': 'nan%': write a number"),
    ("prewarm --into 7 -c {stack}", 2, "--into: '7' is not one tier of 0 cpu, 1 nvme"),
    ("ls abc --limit 99999999999999999999 -c {stack}", 2, "'--limit': "),
    ("plan {deep} --no-measure -c {stack}", 2, "deep.json: is no JSON: "),
    ("prewarm --from file://{folder}/none -c {stack}", 2, "there is no such folder"),
    ("copy {folder} {stack}", 2, "is a folder - write file:///"),
    ("snapshot --to bucket -c {stack}", 2, "neither a url nor a stack file - write s3://"),
    ("copy file://{folder}/a file://{folder}/a", 2, "is where the copy comes from"),
    ("copy {stack} {stack}", 1, "there is no tier further down"),
    ("copy {stack} {stack} --tier nvme", 2, "--tier: that is the tier that is filled"),
    ("copy {stack} file://{folder}/a --into 1", 2, "--into: a url names its tier"),
    ("copy nowhere {stack}", 2, "nowhere: neither a url nor a stack file"),
    ("explain {none} -c {stack}", 2, "write --prompts"),
    ("pin {none} -c {stack}", 2, "write --prompts"),
    ("pin -c {stack}", 2, "name the prompts by --prompts FILE"),
    ("pin --remove --for 1h -c {stack}", 2, "--for: says nothing with --remove"),
    ("clera -c {stack}", 2, "Did you mean 'clear'"),
    ("snapshot --to s3://me:secret@bucket/x -c {stack}", 2, "a user name stands in the url"),
    ("prewarm --from https://bucket/x?sig=secret -c {stack}", 2, "this url names no store"),
    ("config init --bucket http://bucket", 2, "--bucket: this url names no store"),
    ("config init --bucket s3://me:secret@bucket", 2, "--bucket: a user name"),
    ("config init {stack}.new --folder=", 2, "'--folder': an empty text names no folder"),
    ("config init {folder}/none/x.yaml", 1, "none is not a folder; make it"),
    ("ls --config=", 2, "(env var: 'KVTIER_CONFIG'): an empty text names no file"),
    ("prewarm --from= -c {stack}", 2, "'--from': an empty text names no place"),
    ("snapshot --to= -c {stack}", 2, "'--to': an empty text names no place"),
    ("config init --folder {folder} --bucket file://{folder}/x", 2, "that is in the folder of"),
    ("config init --name a/b", 2, "--name: 'a/b' cannot name an engine"),
    ("config init --memory 0", 2, "--memory: a size of nothing"),
    ("config init --memory 120%", 2, "--memory: '120%' is not a share of a medium"),
    ("config init --disk 5XB", 2, "--disk: 'XB' is not a unit"),
    ("copy {stack} file://{folder}/a --prompts {none}", 2, "none.jsonl: holds no prompt"),
    ("prewarm --model {folder} -c {stack}", 2, "--model: says nothing without --prompts"),
    ("plan {model} --scale 0.5 -c {stack}", 2, "--scale: says nothing without --trace"),
    ("plan {model} --block-tokens 16 -c {stack}", 2, "--block-tokens: says nothing without"),
    ("plan {model} --bandwidth nvme=3Gbit/s,1ms -c {stack}", 2, "'3Gbit/s' is no rate; write"),
    ("plan {model} --scale= --trace {model} -c {stack}", 2, "--scale: '': write numbers"),
    (
        "plan {model} --bandwidth nvme=1GB/s --bandwidth 1=2GB/s -c {stack}",
        2,
        "--bandwidth: 1 stands twice",
    ),
    (
        "plan {model} --no-measure --bandwidth device=1GB/s -c {stack}",
        2,
        "--bandwidth: device alone says nothing",
    ),
    ("ls --limit 5 -c {stack}", 2, "--limit: says nothing without NAMESPACE: add it"),
    ("prewarm --from {stack} --into memory -c {fleeting}", 1, "tier 2 (memory) keeps nothing"),
    ("prewarm --into 1 -c {fleeting}", 1, "tier 1 (nvme) keeps nothing"),
    ("snapshot -c {fleeting}", 1, "has 2 object tiers: name a url"),
    ("snapshot --to {fleeting} -c {stack}", 1, "has 2 object tiers: name a url"),
    ("ls -c {stack} -c {stack}", 2, "stands twice"),
    ("serve model -c {stack} --config {stack}", 2, "stands twice"),
    ("ls --tier 0 -t 1 -c {stack}", 2, "stands twice"),
]


@pytest.mark.parametrize(("words", "code", "says"), WRONG, ids=[each[0][:80] for each in WRONG])
def test_a_wrong_call(
    words: str, code: int, says: str, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = filled.parent
    places = {"stack": filled, "folder": folder, "none": folder / "none.jsonl"}
    places["none"].touch()
    places["model"] = folder / "model.json"
    places["model"].write_text(MODEL)
    places["deep"] = folder / "deep.json"
    places["deep"].write_text("[" * 100_000)
    places["fleeting"] = folder / "fleeting.yaml"
    places["fleeting"].write_text(FLEETING.format(folder=folder))
    before = sorted(folder.rglob("*"))
    assert app.run([word.format(**places) for word in words.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in " ".join(err.split())
    assert "secret" not in err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("show", "kvtier ls KEY"),
        ("unpin", "kvtier pin --remove"),
        ("export", "kvtier copy stack.yaml file:///folder"),
        ("import", "kvtier copy file:///folder stack.yaml"),
        ("restore", "kvtier copy URL stack.yaml"),
    ],
)
def test_a_command_of_old_answers_with_the_new_one(
    name: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([name, "x", "-c", "stack.yaml"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert new in err


def test_what_people_type_as_elsewhere(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert app.run(words) == 0
        return capsys.readouterr().out

    assert said("version") == said("--version")
    assert said("help") == said("--help")
    assert said("help", "ls") == said("ls", "--help")
    for short, words in (
        ("gc", ["clear"]),
        ("dashboard", ["top"]),
        ("migrate", ["config", "migrate"]),
    ):
        assert said("help", short) == said(*words, "--help")
    status = said("status", "-c", str(filled)).splitlines()
    du = said("du", "-c", str(filled)).splitlines()
    # Other programs use the disk meanwhile.
    assert [line for line in status if "free there" not in line] == [
        line for line in du if "free there" not in line
    ]
    assert said("-c", str(filled), "verify") == said("verify", "-c", str(filled))
    assert said("-c", str(filled), "gc") == said("clear", "--garbage", "-c", str(filled))
    monkeypatch.chdir(filled.parent)
    assert said("verify") == said("verify", "-c", str(filled))
    assert said("config", "check").startswith("stack.yaml: all is well")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["clear", "3f2a", "--garbage"], "garbage is of no namespace: leave it out"),
        (["clear", "--idle", "30d"], "says nothing without --garbage"),
        (["clear", "--dry-run"], "says nothing without --garbage"),
    ],
)
def test_garbage_is_not_mixed_with_what_is_cleared(
    words: list[str], says: str, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*words, "-c", str(filled)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["ls", ""], ["clear", "", "--yes"], ["verify", "--namespace", ""]]
)
def test_an_empty_text_is_no_namespace(
    words: list[str], filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from a variable of the shell that is not set: above all, it does not mean all."""
    assert app.run([*words, "-c", str(filled)]) == 1
    assert "an empty text names no namespace" in capsys.readouterr().err
    assert app.run(["ls", NAMESPACE.id, "-c", str(filled)]) == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["config", "check", ""], "file"),
        (["explain", "--prompts", "", "-c", "{stack}"], "file"),
        (["copy", "", "{stack}"], "place"),
        (["plan", "", "-c", "{stack}"], "model"),
    ],
)
def test_an_empty_text_is_not_the_folder_here(
    words: list[str], what: str, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([word.format(stack=filled) for word in words]) == 2
    assert f"an empty text names no {what}" in capsys.readouterr().err


def test_options_that_may_stand_twice(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["ls", "--json", "--json", "-c", str(filled)]) == 0
    model = filled.with_name("model.json")
    model.write_text(MODEL)
    rates = ["--bandwidth", "cpu=1GB/s", "--bandwidth", "nvme=2GB/s"]
    assert app.run(["plan", str(model), "--no-measure", *rates, "-c", str(filled)]) == 0
    assert "2 GB/s" in capsys.readouterr().out


def test_completion_of_a_wrong_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KVTIER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvtier ls -c one -c two --lim")
    monkeypatch.setenv("COMP_CWORD", "6")
    done = command()
    assert (done.out.strip(), done.err) == ("--limit", "")


@pytest.mark.parametrize("text", ["", "${NOTHING_IS_SET_HERE:-}"])
def test_an_empty_path_is_not_the_current_folder(text: str, filled: Path) -> None:
    for kind in ("host", "disk/blocks"):
        stack = filled.with_name("empty.yaml")
        stack.write_text(filled.read_text().replace(f"{filled.parent}/{kind}", text))
        done = command("clear", "--yes", "-c", stack)
        assert done.code == 2
        assert ".path: " in done.err
        assert "name a folder" in done.err


@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        (1, ["ls", "-c", "{stack}"], 0),
        (2, ["ls", "-c", "{stack}", "--tier", "9"], 2),
        (0, ["clear", "-c", "{stack}"], 2),
        (1, ["snapshot", "-c", "{stack}", "--to", "file://{stack}.copy"], 0),
    ],
)
def test_a_stream_that_is_closed(closed: int, words: list[str], code: int, filled: Path) -> None:
    """As by `>&-` in a shell: nothing is printed into whatever file has its number then."""
    line = [str(KVTIER), *(word.format(stack=filled) for word in words)]
    done = subprocess.run(
        ["sh", "-c", f'exec {closed}>&-; exec "$@"', "sh", *line], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert "a mistake" not in done.stderr
    copied = [path.read_bytes()[:6] for path in Path(f"{filled}.copy").rglob("*-0")]
    assert set(copied) <= {b"KVTBLK"}


def test_no_snapshot_goes_where_the_stack_itself_keeps_blocks(filled: Path) -> None:
    """There `clear`, or who wants room, would take away what describes it."""
    blocks = filled.parent / "disk" / "blocks"
    before = sorted(blocks.rglob("*"))
    other = filled.with_name("other.yaml")
    host = filled.read_text().partition("  - {kind: nvme")[0]
    other.write_text(f'{host}  - {{kind: object, capacity: 64MiB, url: "file://{blocks}/"}}\n')
    for to in (f"file://{blocks}", f"file://{blocks}/more", other):
        done = command("snapshot", "-c", filled, "--to", to)
        assert done.code == 2
        assert str(blocks) in done.err
        assert ": lies where tier 1 (nvme) keeps its blocks - name another" in done.err
    assert sorted(blocks.rglob("*")) == before


# As `kvtier serve` becomes vLLM, whose files must not get the number of a closed stream either.
BECOMES = """
import os, sys
from kvtier.cli import main
main._fill_standard_streams()
os.execv(sys.executable, [sys.executable, "-c", "import os; print(*map(os.fstat, range(3)))"])
"""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_what_a_command_becomes_has_no_closed_stream(closed: int) -> None:
    line = ["sh", "-c", f'exec {closed}>&-; exec "$@"', "sh", sys.executable, "-c", BECOMES]
    assert subprocess.run(line, capture_output=True).returncode == 0


def test_what_the_library_warns_of_looks_like_the_rest(filled: Path, tmp_path: Path) -> None:
    table = next((tmp_path / "host").rglob("*.table"))
    table.write_bytes(b"damaged")
    done = command("prewarm", "--into", "cpu", "-c", filled)
    assert (done.code, done.err) == (
        0,
        f"kvtier: {table} goes: it is damaged, or of another version\n",
    )


def test_help_shows_what_users_need() -> None:
    """Settings of measurements, and of what the repository generates, work unseen."""
    for words, hidden in (
        ("config schema", "--built-in"),
        ("plan", "--scale"),
        ("plan", "--block-tokens"),
        ("demo", "--layers"),
        ("demo", "--hidden"),
    ):
        done = command(*words.split(), "--help")
        assert done.code == 0
        assert hidden not in done.out
