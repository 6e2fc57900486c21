"""What a writer's claims say of it, and whose claims may go."""

from __future__ import annotations

import msgspec
import pytest
from support.object.claim_simulation import LEASE_S, NameStore

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget.budget import Budget
from kvtier.backends.object.budget.claim import ALONE, CLOSED, SHARING, Claim, writer_of
from kvtier.backends.object.budget.claims import Claims

OURS, THEIRS = f"{0:032x}", f"{1:032x}"
ELSEWHERE = f"{int(writer_ids.process_writer_id()[:8], 16) ^ 1:08x}{'0' * 24}"
"""A writer of another machine, of which nothing but its claims is known."""
FIRST = Claim(OURS, ELSEWHERE, 1, 100, 500, 60_000, ALONE, False, 50.0)
SECOND = Claim(OURS, ELSEWHERE, 2, 10, 900, 60_000, SHARING, True, 40.0)


@pytest.mark.parametrize("claims", [[FIRST, SECOND], [SECOND, FIRST]])
def test_of_several_claims_of_one_writer_all_may_still_be_used(claims: list[Claim]) -> None:
    found = writer_of(claims, 0.0)
    assert (found.claim.bytes, found.claim.cap, found.claim.kind) == (100, 900, ALONE)
    assert found.claim.needs_room, "as it said last"
    assert found.claim.modified_s == 50.0, "the youngest tells how old it is"
    assert found.names == [claim.name for claim in claims]
    assert found.alive


def test_who_has_closed_is_dead_though_an_older_claim_is_still_there() -> None:
    closed = msgspec.structs.replace(SECOND, kind=CLOSED)
    found = writer_of([FIRST, closed], 0.0)
    assert not found.alive
    assert (found.claim.bytes, found.claim.cap) == (100, 900)


def test_who_does_not_renew_is_dead_a_quarter_of_the_lease_later() -> None:
    """And a second: stores tell times in whole seconds."""
    assert writer_of([SECOND, FIRST], 50.0 + 76.0).alive
    assert not writer_of([SECOND, FIRST], 50.0 + 76.1).alive


class Beside:
    """A writer of ours, and claims of others."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = NameStore(lambda: self.now)
        budget = Budget(24, 1, lambda: self.now)
        self.claims = Claims(self.store, OURS, budget, lease_s=LEASE_S, clock=lambda: self.now)
        self.claims.cap.note_foreign({})

    def put(self, namespace: str, rng: int, kind: str) -> str:
        writer = f"{ELSEWHERE[:24]}{rng:08x}"
        name = Claim(namespace, writer, 1, 1, 1, 60_000, kind, False).name
        self.store.put(name, [])
        return name

    def abandoned(self) -> list[str]:
        standing, dead = self.claims.renew()
        assert standing is not None
        return dead


def test_the_dead_of_a_model_are_left_to_those_who_serve_it() -> None:
    """They must first count what these have left."""
    beside = Beside()
    ours, theirs = beside.put(OURS, 1, CLOSED), beside.put(THEIRS, 2, CLOSED)
    assert sorted(beside.abandoned()) == [ours, theirs]
    living = beside.put(THEIRS, 3, SHARING)
    assert beside.abandoned() == [ours]
    beside.put(OURS, 4, SHARING)
    assert beside.abandoned() == [ours]
    beside.store.delete([living])
    assert sorted(beside.abandoned()) == [ours, theirs]
