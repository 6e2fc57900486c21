"""A document as it is read: its places, its bounds, and what it tells of the environment."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.document import DEPTH_MAX, FILE_BYTES_MAX, NODES_MAX, Document
from kvtier.errors import ConfigErrors


def read(text: str) -> Any:
    document = Document.from_text(text, "x.yaml")
    document.check()
    return document.value


def told(document: Document) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        document.check()
    return [(each.line, each.place, each.problem) for each in caught.value.errors]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-7", -7),
        ("0x1f", 31),
        ("0o17", 15),
        ("1" * 41, float("1" * 41)),
        ("2.", 2.0),
        ("-.5e1", -5.0),
        ("-.inf", -math.inf),
        ("TRUE", True),
        ("off", "off"),
        ("~", None),
        ("2026-01-01", "2026-01-01"),
        ("!!str 5", "5"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = read(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_what_is_no_number_is_one_that_yaml_has_a_word_for() -> None:
    assert math.isnan(read("a: .nan")["a"])


@pytest.mark.parametrize("key", ["5", "true", "~", "[a]"])
def test_a_key_is_a_text(key: str) -> None:
    (problem,) = told(Document.from_text(f"a: 1\n? {key}\n: 2\n", "x.yaml"))
    assert problem == ("x.yaml:1:1", "$", "a key is not a text")


def test_where_text_is_no_yaml() -> None:
    with pytest.raises(ConfigErrors) as caught:
        Document.from_text("a: 1\n\tb: 2\n", "x.yaml")
    assert caught.value.errors[0].line == "x.yaml:2:1"
    with pytest.raises(ConfigErrors) as caught:
        Document.from_text("a: 1\nb: 1\x00\n", "x.yaml")
    assert str(caught.value) == (
        r"x.yaml:2:5: $: not YAML: the character '\x00' cannot stand there - save the file as "
        "plain UTF-8 text"
    )


def test_an_empty_text_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigErrors, match="is empty"):
        Document.from_text("")


def test_a_file_may_be_as_long_as_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: 1\n".ljust(FILE_BYTES_MAX, b"#"))
    assert Document.from_file(path).value == {"a": 1}


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ("{a: ", "}")])
def test_how_deep_values_may_be(opened: str, closed: str) -> None:
    assert read(opened * DEPTH_MAX + "5" + closed * DEPTH_MAX) is not None
    with pytest.raises(ConfigErrors, match="nested too deep"):
        read(opened * (DEPTH_MAX + 1) + "5" + closed * (DEPTH_MAX + 1))


@pytest.mark.parametrize("of", [dict, list])
def test_what_is_too_deep_or_too_much_is_told_once(of: type) -> None:
    deep: Any = 5
    for _ in range(DEPTH_MAX):
        deep = {"a": deep} if of is dict else [deep]
    assert Document.from_dict({"one": deep["a"] if of is dict else deep[0]}).problems == []
    with pytest.raises(ConfigErrors, match="nested too deep") as caught:
        Document.from_dict({"one": deep, "two": deep})
    assert len(caught.value.errors) == 1


def test_how_many_values_there_may_be() -> None:
    assert Document.from_dict({"a": [0] * (NODES_MAX - 2)}).problems == []
    with pytest.raises(ConfigErrors, match="repeated too often") as caught:
        Document.from_dict({"a": [0] * (NODES_MAX + 5)})
    assert len(caught.value.errors) == 1


def test_problems_are_told_in_the_order_of_the_file_with_the_nearest_line() -> None:
    document = Document.from_text('a: 1\nb:\n  - c: 2\n    "d e": 3\n  - f\n', "x.yaml")
    for place in ("", "$.b[1].x[0]", "$.b[0]['d e'].y", "$.b[7]", "$.b[0].z", "$.a"):
        document.report(place, "is wrong")
    assert [(line, place) for line, place, _ in told(document)] == [
        ("x.yaml:1:1", "$.a"),
        ("x.yaml:2:1", "$.b[7]"),
        ("x.yaml:3:5", "$.b[0].z"),
        ("x.yaml:4:5", "$.b[0]['d e'].y"),
        ("x.yaml:5:5", "$.b[1].x[0]"),
        ("", ""),
    ]
    nameless = Document.from_text("a: 1")
    nameless.report("$.a", "is wrong")
    assert told(nameless) == [("", "$.a", "is wrong")]


def test_a_default_may_have_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert Document.from_dict({"a": "${NOT_SET:-one\ntwo}"}).value == {"a": "one\ntwo"}


class TestSecrets:
    @pytest.fixture
    def document(self, monkeypatch: pytest.MonkeyPatch) -> Document:
        for name, value in (("ONE", "hunter"), ("TWO", "hunter2"), ("TINY", "xyz")):
            monkeypatch.setenv(name, value)
        text = (
            '{a: ["${ONE}-${TWO:-none}"], dc: "${TINY}", d: 5, b: "$${ONE}",'
            ' c: "${NOT_SET:-plain}"}'
        )
        return Document.from_text(text, "x.yaml")

    def test_which_places_hold_any(self, document: Document) -> None:
        places = ["$", "$.a", "$.a[0]", "$.dc", "$.d", "$.a[0].x"]
        assert [document.interpolated(place) for place in places] == [True] * 4 + [False] * 2

    def test_the_longest_that_fits_is_named(self, document: Document) -> None:
        document.report("$.b", "is hunter2", "not hunter")
        (error,) = document.problems
        assert (error.problem, error.remedy) == ("is ${TWO}", "not ${ONE}")

    def test_short_ones_are_known_again_in_their_own_place_only(self, document: Document) -> None:
        document.report("$.dc", "'xyz' is wrong")
        document.report("$.b", "'xyz' is wrong")
        assert [each.problem for each in document.problems] == [
            "'${TINY}' is wrong",
            "'xyz' is wrong",
        ]

    def test_values_are_shown_as_they_were_written_if_they_hold_any(
        self, document: Document
    ) -> None:
        assert document.value == {
            "a": ["hunter-hunter2"],
            "dc": "xyz",
            "d": 5,
            "b": "${ONE}",
            "c": "plain",
        }
        assert document.as_written("$", document.value) == {
            "a": ["${ONE}-${TWO:-none}"],
            "dc": "${TINY}",
            "d": 5,
            "b": "${ONE}",
            "c": "plain",
        }


@pytest.mark.parametrize("opened", ["[", "{", "[{a: "])
def test_open_brackets_are_counted_before_the_file_is_read_to_its_end(opened: str) -> None:
    with pytest.raises(ConfigErrors, match="nested too deep") as caught:
        Document.from_text("a:\n " + opened * (DEPTH_MAX + 1), "x.yaml")
    assert caught.value.errors[0].line.startswith("x.yaml:2:")


@pytest.mark.parametrize("line", ["- ${NOT_SET}\n", "- ${A_VALUE}${A_VALUE:-}${NOT_SET}\n"])
def test_twice_as_many_problems_cost_twice_as_much(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("A_VALUE", "secret")
    monkeypatch.delenv("NOT_SET", raising=False)

    def calls(lines: int) -> int:
        counted = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            document = Document.from_text(line * lines)
        finally:
            sys.setprofile(None)
        assert len(document.problems) == lines
        return counted

    calls(1)
    assert calls(400) < 2.2 * calls(200)
