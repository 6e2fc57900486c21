"""Whatever stands in a file, the answer is a stack or a list of mistakes with their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.config import load
from kvtier.config.document import Document
from kvtier.errors import ConfigError, ConfigErrors

pytestmark = pytest.mark.usefixtures("other_tiers")

# The fixture installs kinds of tier once for all examples, which none of them changes.
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

KEYS = ["version", "tiers", "name", "mover", "mode", "kind", "capacity", "path", "write", "door"]
KEYS += ["user", "tries", "access", "token", "load_deadline", "queue_blocks"]
TEXTS = ["bench", "shelf", "broken", "through", "64GiB", "-5", "80%", "250ms", "1"]
TEXTS += ["${HOME}", "${NOT_SET}", "$${", "${"]
WORDS = st.sampled_from(KEYS + TEXTS)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
TIER = st.fixed_dictionaries(
    {"kind": st.sampled_from(["bench", "shelf"]), "capacity": SCALARS},
    optional=dict.fromkeys(["path", "write", "door", "access", "load_deadline"], VALUES),
)
TIERS = st.lists(TIER | VALUES, max_size=3)
STACKS = st.fixed_dictionaries(
    {"version": st.just(1), "tiers": TIERS}, optional={"mover": VALUES, "name": VALUES}
)


def mistakes(attempt: Callable[[], object]) -> list[ConfigError]:
    try:
        attempt()
    except ConfigErrors as error:
        return list(error.errors)
    return []


@pytest.mark.slow
@shared
@given(STACKS | st.dictionaries(WORDS, VALUES, max_size=4))
def test_any_dicts(source: dict[str, Any]) -> None:
    for each in mistakes(lambda: load(source)):
        assert each.place.startswith("$")
        assert each.problem


YAML = st.text("[]{}:,-?&*!|>'\"%@`#~ \n\tab$0", max_size=60)


@shared
@given(YAML | st.text(max_size=40))
def test_any_text(text: str) -> None:
    for each in mistakes(lambda: Document.from_text(text, "x.yaml").check()):
        assert each.problem
        assert each.remedy
