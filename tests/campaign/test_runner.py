"""Rounds in processes of their own, books that go on, and findings that a seed repeats."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from campaign.__main__ import import_ahead
from campaign.round import Round, Scenario
from campaign.runner import Books, Runner, write_report


class Dice(Scenario):
    name = "dice"
    about = "Throws dice."

    def play(self, round: Round) -> None:
        round.counts["thrown"] += round.dice.randrange(1000)
        (round.folder / "left").write_text("behind")


class Finds(Scenario):
    name = "finds"
    about = "Finds something in every round."

    def play(self, round: Round) -> None:
        with round.expected("a call", KeyError):
            raise KeyError
        with round.expected("a call", KeyError):
            raise IndexError("not typed")


class Dies(Scenario):
    name = "dies"
    about = "Is killed."

    def play(self, round: Round) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Scenario):
    name = "hangs"
    about = "Never ends, and has a child that does not either."
    limit_s = 0.5

    def play(self, round: Round) -> None:
        os.fork()
        signal.pause()


class Crawls(Scenario):
    name = "crawls"
    about = "Takes longer than a round may rest, and goes on all the time."
    limit_s = 2.0

    def play(self, round: Round) -> None:
        end = time.monotonic() + 2 * self.limit_s
        while time.monotonic() < end:
            round.counts["steps"] += 1


@pytest.fixture
def runner() -> Iterator[MakeRunner]:
    made: list[Runner] = []

    def make(folder: Path, *scenarios: Scenario, seed: int = 7) -> Runner:
        made.append(Runner(folder, seed, {each.name: each for each in scenarios}))
        return made[-1]

    yield make
    for each in made:
        each.close()


MakeRunner = Callable[..., Runner]


def test_a_round_comes_again_by_its_seed(tmp_path: Path, runner: MakeRunner) -> None:
    dice = Dice()
    one = runner(tmp_path / "one", dice).play(dice, 3)
    assert one == runner(tmp_path / "two", dice).play(dice, 3)
    assert one != runner(tmp_path / "three", dice, seed=8).play(dice, 3)
    assert not list((tmp_path / "one").glob("dice-*")), "a round leaves nothing behind"


def test_stacks_can_name_a_folder_in_urls(
    tmp_path: Path, runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runner(Path("here")).folder.as_uri() == (tmp_path / "here").as_uri()


def test_what_is_not_typed_is_found_and_what_is_typed_is_counted(
    tmp_path: Path, runner: MakeRunner
) -> None:
    finds = Finds()
    run = runner(tmp_path, finds)
    result = run.play(finds, 0)
    assert result.counts == {"a call: KeyError": 1}
    (found,) = result.findings
    assert "not typed" in found
    page = write_report(run).read_text()
    assert "make campaign SEED=7 ONLY=finds ROUND=0" in page
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Books) == run.books


@pytest.mark.parametrize(("scenario", "said"), [(Dies(), "died"), (Hangs(), "hangs")])
def test_a_round_that_dies_or_hangs_is_a_finding(
    tmp_path: Path, runner: MakeRunner, scenario: Scenario, said: str
) -> None:
    (found,) = runner(tmp_path, scenario).play(scenario, 0).findings
    assert said in found


def test_a_round_that_goes_on_does_not_hang(tmp_path: Path, runner: MakeRunner) -> None:
    crawls = Crawls()
    result = runner(tmp_path, crawls).play(crawls, 0)
    assert result.counts["steps"]
    assert not result.findings


def test_it_goes_on_where_it_ended(tmp_path: Path, runner: MakeRunner) -> None:
    dice = Dice()
    first = runner(tmp_path, dice)
    first.play(dice, 0)
    with pytest.raises(SystemExit, match="another campaign"):
        runner(tmp_path, dice)
    first.close()
    again = runner(tmp_path, dice)
    again.play(dice, 1)
    assert again.books.tallies["dice"].rounds == 2
    again.close()
    with pytest.raises(SystemExit, match="campaign of seed 7"):
        runner(tmp_path, dice, seed=8)


class TestImportsAhead:
    @pytest.fixture(autouse=True)
    def thawed(self) -> Iterator[None]:
        yield
        gc.unfreeze()

    def test_what_work_imports_is_there_and_what_it_does_is_not(self) -> None:
        done: list[int] = []

        def work() -> None:
            import_module("colorsys")
            done.append(1)

        sys.modules.pop("colorsys", None)
        import_ahead(work)
        assert "colorsys" in sys.modules
        assert not done

    def test_work_that_fails_says_why(self) -> None:
        def work() -> None:
            raise OSError("no disk")

        with pytest.raises(RuntimeError, match="no disk"):
            import_ahead(work)
