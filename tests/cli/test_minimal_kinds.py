"""What commands do with a kind of tier that can only list its blocks, or not even that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.processes.cli_world import flip, install_example, served

from kvtier.cli import app
from kvtier.testing.subject import NAMESPACE, make_keys

# Two kinds of the example's medium, whose inspectors can do less.
PACKAGE = """
from kvtier.inspect import Inspector
from kvtier_folder import FolderBackend, FolderSettings
from kvtier_folder.inspector import FolderInspector
class Listed(FolderSettings, frozen=True, kw_only=True, tag="listed"):
    pass
class Blind(FolderSettings, frozen=True, kw_only=True, tag="blind"):
    pass
class ListedInspector(Inspector):
    def listing(self):
        return FolderInspector(self.opener, self.settings, self.context).listing()
class ListedBackend(FolderBackend):
    kind, settings = "listed", Listed
    def open_inspector(self, settings, context):
        return ListedInspector(self, settings, context)
class BlindBackend(FolderBackend):
    kind, settings = "blind", Blind
    def open_inspector(self, settings, context):
        return Inspector(self, settings, context)
LISTED, BLIND = ListedBackend(), BlindBackend()
"""
ENTRY_POINTS = "listed = minimal_kinds:LISTED\nblind = minimal_kinds:BLIND\n"
KEY = make_keys(1)[0].hex()[:16]


@pytest.fixture
def known_kind(
    second_tier: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    folder = tmp_path_factory.mktemp("package")
    (folder / "minimal_kinds.py").write_text(PACKAGE)
    install_example(folder, monkeypatch, ENTRY_POINTS)
    return second_tier


@pytest.mark.parametrize("second_tier", ["listed"])
@pytest.mark.parametrize(
    "words",
    [["ls"], ["ls", NAMESPACE.id], ["du"], ["ls", KEY], ["verify"]],
)
def test_a_listing_is_enough_to_look(
    words: list[str], filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*words, "-c", str(filled)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "16 good" in out if words == ["verify"] else "listed" in out


@pytest.mark.parametrize("second_tier", ["listed"])
def test_and_to_find_damage(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(next(filled.parent.rglob("*.kv")), 5000)
    assert app.run(["verify", "-c", str(filled), "--json", "--repair"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["counts"]["bad"], found["repaired"]) == (1, 0)
    (said,) = found["troubles"]
    assert "a tier of kind listed cannot take bad blocks out of use" in said


@pytest.mark.parametrize("second_tier", ["listed"])
def test_and_to_copy_from_it_and_into_it(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(filled.read_text().replace("/blocks", "/others").replace("cli", "other"))
    assert app.run(["prewarm", "--from", str(filled), "-c", str(other)]) == 0
    shutil.rmtree(tmp_path / "disk" / "blocks")
    for root in (tmp_path / "host").iterdir():
        shutil.rmtree(root)
    assert app.run(["prewarm", "--from", str(other), "-c", str(filled), "--into", "listed"]) == 0
    assert "8" in capsys.readouterr().out
    assert served(filled) == 8


@pytest.mark.parametrize("second_tier", ["listed", "blind"])
@pytest.mark.parametrize(
    ("words", "cannot"),
    [
        (["clear", "--yes"], "cannot remove its blocks from outside"),
        (["gc"], "cannot find what nobody will ask for again"),
    ],
)
def test_what_it_cannot_do_is_said_and_ends_nothing(
    words: list[str],
    cannot: str,
    second_tier: str,
    filled: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run([*words, "-c", str(filled)]) == 1
    err = capsys.readouterr().err
    assert ("cannot be seen from outside" if second_tier == "blind" else cannot) in err
    assert "--tier" in err
    assert ("clear" in words) is not any((filled.parent / "host").rglob("*.slab"))
    assert list(filled.parent.rglob("*.kv"))


@pytest.mark.parametrize("second_tier", ["blind"])
@pytest.mark.parametrize("words", [["ls"], ["du"], ["verify"]])
def test_what_cannot_be_seen_is_no_mistake_of_the_others(
    words: list[str], filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*words, "-c", str(filled)]) == 1
    out, err = capsys.readouterr()
    assert "what a tier of kind blind holds cannot be seen from outside" in err
    assert "8" in out
