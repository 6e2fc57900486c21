"""A long-run rate with bursts, whatever the clock and the callers do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.interfaces.write_budget import TokenBucket

RATE, BURST = 10.0, 3600.0

amounts = st.floats(0, 1e6)
steps = st.lists(
    st.tuples(st.floats(-1e5, 1e5), st.sampled_from(["take", "charge", "put_back"]), amounts),
    max_size=50,
)


@given(steps)
def test_what_is_granted_never_exceeds_rate_and_burst(
    steps: list[tuple[float, str, float]],
) -> None:
    bucket = TokenBucket(RATE, BURST, BURST, 0.0)
    now = passed = spent = 0.0
    for step, what, amount in steps:
        now += step
        passed += max(0.0, step)
        bucket.fill(now)
        if what == "take":
            spent += bucket.take(amount)
        elif what == "charge":
            bucket.charge(amount)
            spent += amount
        elif amount <= spent:
            bucket.put_back(amount)
            spent -= amount
        assert bucket.level <= BURST
    # In floats of this size nothing smaller is certain.
    charged = sum(amount for _, what, amount in steps if what == "charge")
    assert spent <= BURST + RATE * passed + charged + 1e-3


def test_what_was_charged_is_made_up_for() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0, 0.0)
    bucket.charge(100.0)
    bucket.fill(5.0)
    assert bucket.take(50.0) == 0.0
    bucket.fill(15.0)
    assert bucket.take(100.0) == pytest.approx(50.0)


def test_a_clock_that_is_put_back_or_forward_gives_no_more_than_a_burst() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0, 1000.0)
    bucket.fill(0.0)
    assert bucket.level == 0.0
    bucket.fill(1e12)
    assert bucket.take(1e12) == BURST
