"""`kvtier plan`: arithmetic that can be checked by hand, and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.processes.cli_world import command

from kvtier.cli.expectations import Link, load_seconds, shape_of

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "dtype": "bfloat16",
}
TOKEN_BYTES = 4 * 2 * 2 * 64 * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


GIVEN = ["--no-measure", "--bandwidth=cpu=8GB/s", "--bandwidth=nvme=2GB/s,1ms"]


def run(*args: object, code: int = 0) -> Any:
    done = command("plan", *args, "--json")
    assert done.code == code, done.err
    return json.loads(done.out)


def test_the_stack_of_another_machine(model: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    tiers = [
        {"kind": "cpu", "capacity": "900TiB"},
        {"kind": "nvme", "path": "/mnt/nowhere/blocks", "capacity": "80%"},
    ]
    stack.write_text(json.dumps({"version": 1, "tiers": tiers}))
    done = command("plan", model, "-c", stack, *GIVEN)
    assert done.code == 0, done.err
    assert "900 TiB" in done.out
    assert "tier 1: /mnt/nowhere is not here: 80% is taken of the disk" in done.err
    assert command("plan", model, "-c", stack).code == 2


def test_the_arithmetic(model: Path, stack_file: Path) -> None:
    report = run(model, "-c", stack_file, *GIVEN, "--prefill", "100000", "--prompt", "1000")
    found = report["model"]
    assert found["chunk_bytes"] == TOKEN_BYTES * 256
    host, disk = found["tiers"]
    assert host["tokens"] == (4 << 20) // (TOKEN_BYTES * 256 + 4096) * 256
    assert found["recompute_s"] == pytest.approx(0.01)
    # 1 ms plus 1.024 us a token, against 10 us a token: one chunk of 256 tokens is enough.
    assert disk["break_even_tokens"] == 256
    loaded = 0.001 + 768 * TOKEN_BYTES / 2e9
    assert disk["first_token_s"] == pytest.approx(loaded + 232 / 100000)


def test_a_tier_loads_no_more_of_a_prompt_than_it_holds(model: Path, stack_file: Path) -> None:
    host = run(model, "-c", stack_file, *GIVEN, "--prefill", "1000")["model"]["tiers"][0]
    assert host["tokens"] < 8192
    loaded = host["tokens"] * TOKEN_BYTES / 8e9
    assert host["first_token_s"] == pytest.approx(loaded + (8192 - host["tokens"]) / 1000)


def test_break_even_moves_with_the_prefill(model: Path, stack_file: Path) -> None:
    def even(prefill: int) -> int | None:
        report = run(model, "-c", stack_file, *GIVEN, "--prefill", prefill)
        found: int | None = report["model"]["tiers"][1]["break_even_tokens"]
        return found

    shape = shape_of(CONFIG, "", "auto", 1)
    link = Link(2e9, 1e-3, "given")
    length = even(500_000)
    assert length is not None
    assert load_seconds(shape, length, link, None) < length / 500_000
    assert load_seconds(shape, length - 256, link, None) >= (length - 256) / 500_000
    assert even(2_000_000) is None, "no length makes up for a rate below the engine's own"


def test_the_way_to_the_device_can_be_the_slower_one(model: Path, stack_file: Path) -> None:
    fast = run(model, "-c", stack_file, *GIVEN)["model"]["tiers"][0]
    slow = run(model, "-c", stack_file, *GIVEN, "--bandwidth=device=1GB/s")["model"]["tiers"][0]
    assert slow["load_tokens_per_s"] == pytest.approx(fast["load_tokens_per_s"] / 8)


def test_measured(model: Path, stack_file: Path) -> None:
    report = run(model, "-c", stack_file, "--prefill", "10")
    assert [tier["link"]["source"] for tier in report["model"]["tiers"]] == ["measured"] * 2
    assert all(tier["break_even_tokens"] == 256 for tier in report["model"]["tiers"])


def test_what_is_given_is_not_measured(model: Path, stack_file: Path) -> None:
    """Its disk may have no room for that."""
    stack_file.write_text(stack_file.read_text().replace("free_floor: 0", "free_floor: 1000TiB"))
    assert "too little free room" in command("plan", model, "-c", stack_file).err
    given = ("--bandwidth", "nvme=2GB/s,1ms")
    tiers = run(model, "-c", stack_file, *given)["model"]["tiers"]
    assert [tier["link"]["source"] for tier in tiers] == ["measured", "given"]


def test_for_people(model: Path, stack_file: Path) -> None:
    done = command("plan", model, "-c", stack_file, *GIVEN)
    assert done.code == 0
    assert "2 KiB a token" in done.out
    assert "--prefill RATE" in done.said


def test_windows_are_stored_once_a_prompt(model: Path, stack_file: Path) -> None:
    """And a chunk has no more tokens than they have."""
    kinds = ["full_attention", "sliding_attention"] * (CONFIG["num_hidden_layers"] // 2)
    windowed = CONFIG | {"layer_types": kinds, "sliding_window": 128}
    (model / "config.json").write_text(json.dumps(windowed))
    found = run(model, "-c", stack_file, *GIVEN)["model"]
    assert (found["chunk_tokens"], found["chunk_bytes"]) == (128, TOKEN_BYTES // 2 * 128)
    assert found["tiers"][0]["tokens"] == (4 << 20) // (TOKEN_BYTES // 2 * 128 + 4096) * 128
    assert "1 KiB a token, 128 KiB a prompt" in command("plan", model, "-c", stack_file, *GIVEN).out


def test_what_is_not_counted_is_said(model: Path, stack_file: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"full_attention_interval": 2}))
    done = command("plan", model, "-c", stack_file, *GIVEN)
    assert "not counted: 2 layers keep a state" in done.said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--bandwidth=tape=1GB/s"], "is not one tier of"),
        (["--bandwidth=nvme=fast"], "like 200MB/s"),
        (["--scale=0,1"], "write numbers like"),
        (["--prefill=inf"], "--prefill"),
        ([f"--prompt={'9' * 400}"], "--prompt"),
        (["--kv-dtype=float3"], "is not known"),
        (["--trace=none.jsonl"], "cannot be read"),
    ],
)
def test_wrong_calls(model: Path, stack_file: Path, args: list[str], says: str) -> None:
    done = command("plan", model, "-c", stack_file, *GIVEN, *args)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_no_model(tmp_path: Path, stack_file: Path) -> None:
    done = command("plan", tmp_path / "none", "-c", stack_file, *GIVEN)
    assert done.code == 2
    assert "name a model's folder" in done.err


def write_trace(path: Path, talks: int, requests: int) -> Path:
    """Conversations that take turns, one block longer each time."""
    blocks: list[list[int]] = [[0] for _ in range(talks)]
    rows = []
    for number in range(requests):
        talk = blocks[number % talks]
        talk.append(number + 1)
        rows.append({"timestamp": number * 1000, "hash_ids": list(talk)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestTrace:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return write_trace(tmp_path / "trace.jsonl", talks=20, requests=200)

    def test_a_sweep(self, model: Path, stack_file: Path, trace: Path) -> None:
        args = ["--trace", trace, "--prefill=1000", "--scale=20,1"]
        rows = run(model, "-c", stack_file, *GIVEN, *args)["trace"]
        assert [row["scale"] for row in rows] == [1.0, 20.0]
        small, whole = rows
        assert small["hit_percent"] < whole["hit_percent"]
        assert whole["references"] == sum(2 + number // 20 for number in range(200))
        assert whole["saved_seconds"] == pytest.approx(whole["saved_tokens"] / 1000)
        assert sum(tier["hit_percent"] for tier in whole["tiers"]) == pytest.approx(
            whole["hit_percent"]
        )

    def test_a_tier_without_room_for_one_block_has_no_hits(
        self, model: Path, stack_file: Path, trace: Path
    ) -> None:
        args = [model, "-c", stack_file, *GIVEN, "--trace", trace, "--scale=0.1"]
        (row,) = run(*args)["trace"]
        host, disk = row["tiers"]
        assert (host["capacity"], host["hit_percent"], host["written_bytes"]) == (0, 0, 0)
        assert row["hit_percent"] == disk["hit_percent"]

    def test_a_budget_that_is_set_is_simulated(
        self, model: Path, stack_file: Path, trace: Path
    ) -> None:
        args = [model, "-c", stack_file, *GIVEN, "--trace", trace, "--scale=1"]
        (free,) = run(*args)["trace"]
        nvme = "kind: nvme"
        assert nvme in stack_file.read_text()
        stack_file.write_text(stack_file.read_text().replace(nvme, f"{nvme}, writes: 100MiB/day"))
        (row,) = run(*args)["trace"]
        assert 0 < row["tiers"][1]["written_bytes"] < free["tiers"][1]["written_bytes"]

    def test_as_a_table(self, model: Path, stack_file: Path, trace: Path) -> None:
        done = command("plan", model, "-c", stack_file, *GIVEN, "--trace", trace, columns=40)
        assert done.code == 0
        assert "200 requests" in done.out

    def test_how_often_a_day_is_not_known_of_a_trace_that_takes_no_time(
        self, model: Path, stack_file: Path, tmp_path: Path
    ) -> None:
        trace = tmp_path / "at_once.jsonl"
        lines = ({"timestamp": 5000, "hash_ids": [0, 1, number]} for number in range(2, 52))
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        args = ["--trace", trace, "--scale=1"]
        (row,) = run(model, "-c", stack_file, *GIVEN, *args)["trace"]
        assert {tier["writes_per_day"] for tier in row["tiers"]} == {None}
        table = command("plan", model, "-c", stack_file, *GIVEN, *args).out.splitlines()
        assert [line.split()[-1] for line in table if "nvme" in line][-1] == "-"

    def test_a_bad_line_is_named(self, model: Path, stack_file: Path, trace: Path) -> None:
        with trace.open("a") as file:
            file.write("{\n")
        done = command("plan", model, "-c", stack_file, *GIVEN, "--trace", trace)
        assert done.code == 2
        assert "trace.jsonl:201" in done.err
