"""Stores and disks that fail, fill up, lie, go and come back, while clocks jump."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from support.object.faulty_store import Fault, FaultPlan, FaultySubject
from support.tiers import subjects

from campaign.round import Round, Scenario
from campaign.stacks import wrong_clock
from kvtier.backends.object.lease import LEASE_S
from kvtier.errors import MediumError
from kvtier.testing import faults
from kvtier.testing.faults import SURVIVABLE
from kvtier.testing.subject import Rig, failures, make_keys
from kvtier.types import Outcome

_BLOCKS = 8
_SPELLS = 8
_STEPS = 40
_PATIENCE_S = 30.0 + LEASE_S
"""A caretaker that cannot say that it leaves, the store being full, is waited for so long."""
_HOUR_S = 3600.0
Change = Callable[[], str]


class Media(Scenario):
    name = "media"
    about = (
        "Spells in which a store is down, answers 503, loses answers, returns other objects or "
        "fewer bytes, forgets or lists wrongly, or a disk fails, is full, reads or writes wrong "
        "bits; in half of them the clock jumps by hours, either way. At every moment right bytes "
        "or a miss, nothing raised; and full service once all is well."
    )

    def play(self, round: Round) -> None:
        home = round.folder / "medium"
        home.mkdir()
        if round.number % 3:
            plan = FaultPlan(round.dice.randrange(1 << 30))
            rig = Rig(FaultySubject(plan), home, blocks=_BLOCKS)
            self._spells(round, rig, lambda: _change_faults(round, plan))
            plan.kinds = ()
            round.counts.update({f"calls, a store {what}": n for what, n in plan.happened.items()})
        else:
            disk = faults.FaultyDisk(seed=round.dice.randrange(1 << 30))
            subject = subjects.NVME if round.number % 2 else subjects.SLABS
            rig = Rig(subject, home, blocks=_BLOCKS, disk=disk)
            self._spells(round, rig, lambda: _change_disk(round, disk))
            disk.plan = faults.never
            for _, fault in disk.happened:
                round.counts[f"calls, a disk: {fault.value}"] += 1
        _full_service(round, rig)
        rig.close()

    def _spells(self, round: Round, rig: Rig, change: Change) -> None:
        for _ in range(_SPELLS):
            said = change()
            jump = round.dice.uniform(-6, 6) * _HOUR_S if round.dice.random() < 0.5 else 0.0
            round.counts["spells"] += 1
            round.counts["spells with a clock that jumps"] += jump != 0.0
            with wrong_clock(partial(int, jump * 1e9)):
                try:
                    _use(round, rig)
                    if round.dice.random() < 0.2:
                        _reopen(round, rig)
                except Exception as error:
                    round.found(f"{said}, the clock off by {jump:.0f} s: {error!r}")
                    raise


def _change_faults(round: Round, plan: FaultPlan) -> str:
    plan.kinds = [round.dice.choice(list(Fault)) for _ in range(round.dice.choice((1, 1, 3)))]
    plan.rate = round.dice.choice((0.05, 0.05, 0.3, 1.0))
    return f"a store that {[kind.value for kind in plan.kinds]} at {plan.rate:.0%} of calls"


def _change_disk(round: Round, disk: faults.FaultyDisk) -> str:
    kinds = round.dice.sample(SURVIVABLE, round.dice.choice((1, 2)))
    rate = round.dice.choice((0.05, 0.3, 1.0))
    disk.plan = faults.seeded(round.dice.randrange(1 << 30), rate, kinds)
    return f"a disk with {[kind.value for kind in kinds]} at {rate:.0%} of calls"


def _use(round: Round, rig: Rig) -> None:
    """Use a tier in every way; `Rig.get` proves whatever it serves."""
    dice: random.Random = round.dice
    universe = make_keys(4 * _BLOCKS)
    for _ in range(_STEPS):
        some = dice.sample(universe, dice.randint(1, _BLOCKS))
        step = dice.random()
        if step < 0.45:
            round.counts["blocks stored"] += len(rig.put(some))
        elif step < 0.85:
            round.counts["blocks proved"] += len(rig.get(universe))
        elif step < 0.9:
            rig.tier.forget(some)
        elif step < 0.95:
            reserved = rig.reserve(some).keys
            rig.tier.complete_store(reserved, failures(reserved, Outcome.TIMEOUT))
        else:
            rig.tier.touch(some)
        rig.tier.tick()


def _reopen(round: Round, rig: Rig) -> None:
    rig.close()
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            rig.open()
            return
        except MediumError:
            round.counts["openings refused with a sentence"] += 1
            if time.monotonic() > end:
                raise
            if isinstance(rig.disk, faults.FaultyDisk):
                rig.disk.plan = faults.never


def _full_service(round: Round, rig: Rig) -> None:
    """It stores and serves as much as ever, and so does the next life."""
    count = _BLOCKS - rig.subject.quarantine_blocks
    end, number = time.monotonic() + _PATIENCE_S, 1000
    while True:
        rig.settle()
        new = make_keys(count, start=number)
        number += count
        if rig.put(new) == new and rig.get(new) == new:
            break
        if time.monotonic() > end:
            round.found(f"after all is well again {count} new blocks cannot be kept")
            return
        time.sleep(0.05)
    rig.reopen()
    round.check(rig.get(new) == new, "the next life does not serve what was stored last")
    round.counts["full service afterwards"] += 1
