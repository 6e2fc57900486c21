"""What `du` and `doctor` say of a tier that may only be written so much; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_world import command, fill


def with_budget(stack: Path, budget: str) -> Path:
    stack.write_text(stack.read_text().replace("kind: nvme", f"kind: nvme, {budget}"))
    return stack


def test_du_says_what_was_written_and_what_may_be(stack_file: Path) -> None:
    with_budget(stack_file, "writes: 24GiB/day")
    fill(stack_file)
    done = command("du", "-c", stack_file, "--json")
    writes = json.loads(done.out)[1]["writes"]
    assert writes["per_day"] == 24 << 30
    block_bytes = json.loads(done.out)[1]["block_bytes"]
    assert block_bytes <= writes["written"] <= 1.1 * block_bytes
    assert 0 < writes["left"] <= 1 << 30
    (drive,) = writes["drives"]
    assert drive["written"] is not None or drive["problem"]
    shown = command("du", "-c", stack_file)
    assert (shown.code, shown.err) == (0, "")
    assert "24 GiB a day" in shown.out
    assert "not kvtier's" not in shown.out


def test_without_a_budget_du_says_nothing_of_it(filled: Path) -> None:
    done = command("du", "-c", filled, "--json")
    assert [tier["writes"] for tier in json.loads(done.out)] == [None, None]
    assert "a day" not in command("du", "-c", filled).out


@pytest.mark.parametrize(
    ("budget", "level", "says"),
    [
        ("writes: 1GiB/day", "ok", "1 GiB a day"), ("endurance: 900", "ok", "a day may be written"),
     ("writes: 900TiB/h", "note", "times the file system a day")],
)  # fmt: skip
def test_doctor_looks_at_it(stack_file: Path, budget: str, level: str, says: str) -> None:
    with_budget(stack_file, budget)
    done = command("doctor", "-c", stack_file, "--no-measure", "--json")
    found = json.loads(done.out)["findings"]
    mine = [each for each in found if "a day" in each["what"]]
    assert [(each["level"], says in each["what"]) for each in mine] == [(level, True)]


def test_measuring_is_not_held_up_by_it(stack_file: Path) -> None:
    with_budget(stack_file, "writes: 1GiB/day")
    found = json.loads(command("doctor", "-c", stack_file, "--json").out)
    assert [tier["hits"] >= tier["blocks"] for tier in found["measured"]] == [True, True]
    assert not (stack_file.parent / "disk" / "blocks" / "writes").exists()


@pytest.mark.parametrize(
    ("budget", "place", "says"),
    [
        ("writes: 1TiB/day, endurance: 1", "tiers[1]", "write one of them"),
        ("writes: 1TiB", "tiers[1].writes", '"2TiB/day"'),
        ("writes: 1TiB/week", "tiers[1].writes", '"2TiB/day"'),
        ("writes: fast/day", "tiers[1].writes", "like"),
        ("writes: 0GiB/day", "tiers[1].writes", "write: never"),
        ("writes: 5", "tiers[1].writes", '"2TiB/day"'),
        ("endurance: 0", "tiers[1].endurance", "0"),
        ("endurance: often", "tiers[1].endurance", "number"),
        ("writes: 10B/day", "tiers[1].writes", "block an hour"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    stack_file: Path, budget: str, place: str, says: str
) -> None:
    done = command("config", "check", with_budget(stack_file, budget))
    assert done.code == 2
    assert place in done.err
    assert says in done.err
    assert f"{stack_file}:" in done.err


def test_what_config_shows_can_be_read_again(stack_file: Path, tmp_path: Path) -> None:
    with_budget(stack_file, "writes: 2TiB/day")
    shown = command("config", "show", stack_file)
    assert "writes: 2TiB/day" in shown.out
    again = tmp_path / "again.yaml"
    again.write_text(shown.out)
    assert command("config", "check", again).code == 0
