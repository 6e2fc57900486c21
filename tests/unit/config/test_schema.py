"""JSON Schema and reference are made from the types, with the kinds of other packages."""

from __future__ import annotations

import enum
from typing import Any

import jsonschema
import msgspec
import pytest

from kvtier.config import StackConfig
from kvtier.config.schema import Schema, descriptions, json_schema
from kvtier.interfaces.backend import kinds
from kvtier.settings import ByteSize, TierSettings, WritePolicy
from tools.configuration_reference import reference

KINDS = ["bench", "shelf"]


@pytest.fixture
def validator(other_tiers: None) -> Any:
    schema = json_schema(KINDS)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def stack(*tiers: dict[str, object], **more: object) -> dict[str, object]:
    return {"version": 1, "tiers": list(tiers), **more}


BENCH: dict[str, object] = {"kind": "bench", "capacity": "1GiB"}
SHELF: dict[str, object] = {"kind": "shelf", "capacity": "80%", "path": "/x"}

GOOD = [
    stack(BENCH),
    stack(BENCH, SHELF | {"access": {"user": "me", "token": "x"}, "door": {"user": "you"}}),
    stack(BENCH | {"capacity": 5, "load_deadline": 1.5, "write": "never"}),
    stack(BENCH | {"capacity": "${SIZE:-5GiB}", "load_deadline": "${WAIT}ms"}),
    stack(BENCH | {"queue_blocks": "${BLOCKS}", "write": "${WRITE:-never}"}, name="${NAME}"),
    stack(BENCH, mover={"mode": "threads"}, name="x", chunk_tokens=16),
]
BAD = [
    {},
    {"version": 1},
    stack(BENCH) | {"version": 2},
    stack(BENCH, tier=[]),
    stack(BENCH | {"capacity": "5G"}),
    stack(BENCH | {"capacity": -5}),
    stack(BENCH | {"load_deadline": "5"}),
    stack(BENCH | {"kind": "nope"}),
    stack(BENCH | {"wrt": "never"}),
    stack(BENCH | {"write": "sometimes"}),
    stack(BENCH | {"queue_blocks": 0}),
    stack(BENCH | {"queue_blocks": "5"}),
    stack(BENCH, name="../up"),
    stack(BENCH, mover="${MOVER}"),
    stack(BENCH, SHELF | {"access": {"token": "x"}}),
    stack(BENCH, {"kind": "shelf", "capacity": 5}),
]


@pytest.mark.parametrize("document", GOOD)
def test_good_stacks_are_valid(validator: Any, document: dict[str, object]) -> None:
    validator.validate(document)


@pytest.mark.parametrize("document", BAD)
def test_bad_stacks_are_not(validator: Any, document: dict[str, object]) -> None:
    assert not validator.is_valid(document)


def test_editors_are_told_what_things_mean(other_tiers: None) -> None:
    parts = json_schema(KINDS)["$defs"]
    shelf = parts["ShelfSettings"]["properties"]
    assert shelf["path"]["description"] == "Where it is."
    assert shelf["part_size"]["default"] == "8MiB"
    assert shelf["capacity"]["description"] == descriptions(TierSettings)["capacity"]
    assert parts["Access"]["properties"]["user"]["description"] == "A name."
    assert [word["const"] for word in parts["WritePolicy"]["oneOf"]] == [
        word.value for word in WritePolicy
    ]
    assert [word["description"] for word in parts["WritePolicy"]["oneOf"]] == [
        descriptions(WritePolicy)[word.name] for word in WritePolicy
    ]
    assert parts["ShelfSettings"]["properties"]["door"]["default"] == {
        "user": "nobody",
        "token": None,
        "tries": 3,
    }


class Shelf(msgspec.Struct):
    """A part of a setting."""

    size: ByteSize = ByteSize(5)


def test_settings_may_be_collections_of_mappings() -> None:
    schema = Schema([])
    shelf = {"$ref": "#/$defs/Shelf"}
    for kind in (list[Shelf], tuple[Shelf, ...]):
        assert schema.form(kind) == {"type": "array", "items": shelf}
    named = {"type": "object", "additionalProperties": shelf}
    assert schema.form(dict[str, Shelf]) == named
    assert schema.parts["Shelf"]["properties"]["size"]["default"] == "5B"


def test_the_reference_has_all_settings_and_words(other_tiers: None) -> None:
    text = reference(KINDS)
    assert "| `path` | path | required | Where it is. |" in text
    assert "| `part_size` | size | `8MiB` |" in text
    assert "| `write` | `through` `on_evict` `never` | `on_evict` |" in text
    assert "| `tries` | whole number | `3` |" in text
    assert "- `second_touch`: " in text
    for field in msgspec.structs.fields(StackConfig):
        if isinstance(field.type, type) and issubclass(field.type, enum.Enum):
            assert f"\n`{field.name}`: " in text
            assert all(f"\n- `{word.value}`: " in text for word in field.type)
    for name in StackConfig.__struct_fields__:
        assert f"| `{name}` |" in text


def test_every_setting_of_a_stack_is_described() -> None:
    assert set(descriptions(StackConfig)) == set(StackConfig.__struct_fields__)


def test_built_in_kinds_are_those_of_this_package(other_tiers: None) -> None:
    assert {"cpu", "memory", "nvme"} <= set(kinds(built_in=True))
    assert set(kinds()) - set(kinds(built_in=True)) >= {"bench", "shelf", "broken", "stranger"}
