"""One round of a scenario: its dice, its folder, and what it has counted and found."""

from __future__ import annotations

import random
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Finding(msgspec.Struct):
    """A promise that did not hold, and the round in which it did not."""

    scenario: str
    round: int
    text: str


class Result(msgspec.Struct):
    """What came of one round."""

    counts: dict[str, int]
    findings: list[str]
    notes: list[str] = []


class Round:
    """A scenario's round: all that is left to chance comes from `dice`, so that the seed of the
    campaign and the round's number repeat it."""

    def __init__(self, scenario: str, seed: int, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        self.dice = random.Random(f"{seed} {scenario} {number}")
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self.notes: list[str] = []
        """Figures of this round alone, for the report."""

    def found(self, text: str) -> None:
        """A promise does not hold."""
        self.findings.append(text)

    def check(self, holds: bool, text: str) -> None:
        """A promise that has to hold."""
        if not holds:
            self.found(text)

    @contextmanager
    def expected(self, what: str, *typed: type[BaseException]) -> Iterator[None]:
        """What may raise these alone: they are counted, anything else is a finding."""
        try:
            yield
        except typed as error:
            self.counts[f"{what}: {type(error).__name__}"] += 1
        except Exception:  # whatever else is raised is what a campaign looks for
            self.found(f"{what}: {traceback.format_exc()}")

    @property
    def result(self) -> Result:
        return Result(dict(self.counts), self.findings, self.notes)


class Scenario(ABC):
    """A kind of trouble."""

    name: str
    about: str
    """In one sentence, for the report."""
    share: float = 1.0
    """Of the campaign's time, beside the others'; 0 is played only if it is named."""
    limit_s: float = 120.0
    """A round that counts nothing for so long hangs."""
    round_s: float = 0.0
    """What a round takes, where that is long: it waits until the others have had as much."""

    @abstractmethod
    def play(self, round: Round) -> None:
        """One round, of a few seconds as a rule."""
