"""Damage of every kind, on every tier and every kind of file; none of it is served."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from campaign.damage import files as whole_files
from campaign.damage import records, specimens
from campaign.damage.specimens import SPECIMENS, Place, Specimen, kind_of
from campaign.round import Round, Scenario
from kvtier.errors import FormatError, MediumError
from kvtier.types import BlockKey, Outcome

_PASSES = 1600
"""Over all records of a specimen, in a medium that is open."""
_OPENINGS = 60
_FILES_MAX = 6
_STACKED = ("nvme", "object")
Read = Callable[[], dict[BlockKey, Outcome]]


class Damage(Scenario):
    name = "damage"
    about = (
        "Flips, noise, truncations, swaps, replays of old records and old tables, wrong lengths "
        "under right checksums, another namespace's records and files, and what is no file, on "
        "every kind of file of every tier. A block that is offered has its right bytes; a record "
        "whose proved bytes have changed is not served; a record beside it is; nothing raises what "
        "is not typed; what lies outside the folder stays as it is."
    )
    share = 3.0

    def play(self, round: Round) -> None:
        kind = list(SPECIMENS)[round.number % len(SPECIMENS)]
        specimen = Specimen(kind, SPECIMENS[kind], round.folder / "medium")
        outside = round.folder / "outside"
        outside.write_bytes(b"not kvtier's")
        specimen.restore(specimen.files)
        read, close = _opened(specimen)
        pool = _pool(specimen)
        try:
            for _ in range(_PASSES):
                _damage_records(round, specimen, pool, read)
        finally:
            close()
        for number in range(_OPENINGS):
            stacked = kind in _STACKED and number % 3 == 2
            _damage_files(round, specimen, outside, stacked=stacked)
        round.check(outside.read_bytes() == b"not kvtier's", "what a link led to was written")


def _pool(specimen: Specimen) -> list[bytes]:
    """Records of now, of earlier, and of another namespace."""
    found = []
    for state in (specimen.files, specimen.older, specimen.foreign):
        for place in specimen.places:
            record = state.get(place.path, b"")[place.at : place.at + place.size]
            if len(record) == place.size:
                found.append(record)
    return found


def _opened(specimen: Specimen) -> tuple[Read, Callable[[], None]]:
    """A medium that stays open while its bytes change; how all its blocks are read, and closed."""
    keys = [place.key for place in specimen.places]
    rig = specimen.rig(specimen.folder)
    resident = rig.resident(keys)
    assert resident == keys, f"{specimen.kind}: {len(resident)} of {len(keys)} blocks are there"
    spec = rig.tier.prepare_load(keys)
    return lambda: rig.read(keys, spec), rig.close


def _damage_records(round: Round, specimen: Specimen, pool: Sequence[bytes], read: Read) -> None:
    """Damage about half of all records, read all of them, and put them right again."""
    must_fail: dict[BlockKey, str] = {}
    may_fail: set[BlockKey] = set()
    touched: list[Place] = []
    for place in specimen.places:
        if round.dice.random() < 0.5:
            continue
        lies = round.dice.random() < 0.15
        damage = round.dice.choice(records.LIES if lies else records.NOISE)
        whole = specimen.files[place.path]
        record = bytearray(whole[place.at : place.at + place.size])
        damage(round.dice, memoryview(record), pool)
        touched.append(place)
        _write(specimen.folder / place.path, place.at, record)
        _count(round, specimen.kind, "record", damage.__name__)
        if _proved(record, place) == _proved(whole[place.at : place.at + place.size], place):
            round.counts["damages beside what is proved"] += 1
        elif lies:
            may_fail.add(place.key)
        else:
            must_fail[place.key] = damage.__name__
    outcomes = read()
    for key, outcome in outcomes.items():
        if outcome.ok and key in must_fail:
            round.found(f"{specimen.kind}: a record was served after {must_fail[key]}")
        if not outcome.ok and key not in must_fail and key not in may_fail:
            round.found(f"{specimen.kind}: a record without damage is {outcome.value}")
    round.counts["blocks served beside damage"] += sum(each.ok for each in outcomes.values())
    round.counts["blocks refused"] += sum(not each.ok for each in outcomes.values())
    for place in touched:
        whole = specimen.files[place.path]
        _write(specimen.folder / place.path, place.at, whole[place.at : place.at + place.size])


def _proved(record: bytes | bytearray, place: Place) -> bytes:
    return place._replace(path="", at=0).proved({"": bytes(record)})


def _write(path: Path, at: int, data: bytes | bytearray) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def _damage_files(round: Round, specimen: Specimen, outside: Path, *, stacked: bool) -> None:
    """Damage some files, open the medium anew, and prove all that it offers."""
    dice, state = round.dice, dict(specimen.files)
    by_kind: dict[str, list[str]] = defaultdict(list)
    for path in sorted(state):
        by_kind[kind_of(path)].append(path)
    said = []

    def note(kind: str, what: str) -> None:
        _count(round, specimen.kind, kind, what)
        said.append(f"{kind} {what}")

    for _ in range(dice.randint(1, _FILES_MAX)):
        path = dice.choice(by_kind[dice.choice(sorted(by_kind))])
        if path in state:
            damage = dice.choice(whole_files.CONTENTS)
            damage(dice, specimen, state, path)
            note(kind_of(path), damage.__name__)
    specimen.restore(state)
    if state and dice.random() < 0.1:
        note("file", whole_files.become_odd(dice, specimen.folder, sorted(state), outside))
    round.counts["openings of damaged media"] += 1
    before = len(round.findings)
    with round.expected(f"{specimen.kind} opened", MediumError, FormatError):
        served = _serve(specimen, round.folder, stacked=stacked)
        round.counts["blocks served beside damage"] += len(served)
    round.findings[before:] = [f"after {said}: {each}" for each in round.findings[before:]]


def _count(round: Round, medium: str, kind: str, what: str) -> None:
    round.counts["damages"] += 1
    round.counts[f"damages, {medium}: {kind}"] += 1
    round.counts[f"damages, how: {what.replace('_', ' ')}"] += 1


def _serve(specimen: Specimen, folder: Path, *, stacked: bool) -> set[BlockKey]:
    if not stacked:
        return specimens.by_tier(specimen)
    host = folder / "host"
    host.mkdir(exist_ok=True)
    return specimens.by_stack(specimen, host)
