"""Names: what is a block of ours, and what is somebody else's and never touched."""

from __future__ import annotations

import pytest

from kvtier.backends.object.object_names import GENERATION_MAX, block_name, parse_block
from kvtier.testing.subject import NAMESPACE, make_keys

[KEY] = make_keys(1)
NAME = block_name(NAMESPACE.id, KEY)
TEXT = KEY.hex()
FOLDER = f"{NAMESPACE.id}/blocks/{TEXT[:2]}/{TEXT[2:4]}"


@pytest.mark.parametrize("generation", [0, 7, GENERATION_MAX])
def test_the_name_of_a_block_says_which_it_is(generation: int) -> None:
    name = block_name(NAMESPACE.id, KEY, generation)
    assert name == f"{FOLDER}/{TEXT}-{generation}"
    assert parse_block(name) == (NAMESPACE.id, KEY, generation)


@pytest.mark.parametrize(
    "name",
    [
        f"{FOLDER}/{TEXT}-{GENERATION_MAX + 1}",
        f"{FOLDER}/{TEXT}-07",
        f"{FOLDER}/{TEXT}-",
        f"{FOLDER}/{TEXT}",
        f"{FOLDER}/{TEXT[:8]}-0",
        f"{FOLDER}/{TEXT}00000000000000000000-0",
        f"{FOLDER}/{TEXT[:-1]}-0",
        NAME.upper(),
        NAME.replace(f"/{TEXT[:2]}/", "/00/", 1),
        NAME.replace(f"/{TEXT[2:4]}/", "/00/", 1),
        NAME.replace("blocks", "manifest"),
        NAME[1:],
        NAME + "\n",
    ],
)
def test_what_looks_like_a_block_is_none(name: str) -> None:
    assert parse_block(name) is None
