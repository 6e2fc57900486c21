"""What of vLLM's `--kv-transfer-config` is read, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm.settings import read_flag, read_stack, unread, whole_number


def test_nothing_is_said_of_what_is_read() -> None:
    names = ("stack", "blocks_per_chunk", "weights", "offload_prompt_only", "spec_name")
    assert unread(dict.fromkeys(names)) == []


def test_a_mistake_is_named_with_what_it_may_mean() -> None:
    (said,) = unread({"stack": "stack.yaml", "weigths": "mine"})
    assert said.endswith('.weigths is not known, and ignored: did you mean "weights"?')


def test_what_belonged_to_another_connector() -> None:
    said = unread({"cpu_bytes_to_use": 1 << 30, "stack": {}})
    assert said == [
        "kv_connector_extra_config.cpu_bytes_to_use is not known, and ignored: tiers are set in "
        "the stack"
    ]


def test_a_flag_is_true_or_false() -> None:
    assert [read_flag(each, "kv_events_by_tier") for each in ({}, {"kv_events_by_tier": True})] == [
        False,
        True,
    ]
    with pytest.raises(ConfigError, match="kv_events_by_tier: is 'yes' - give true or false"):
        read_flag({"kv_events_by_tier": "yes"}, "kv_events_by_tier")


@pytest.mark.parametrize("extra", [{}, {"stack": 3}])
def test_there_must_be_a_stack(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="give the path of a stack's YAML file"):
        read_stack(extra)


def test_a_stack_file_is_read_once(tmp_path: Path) -> None:
    """All that a process opens is of one stack, though somebody edits the file meanwhile."""
    file = tmp_path / "stack.yaml"
    tier = f"{{kind: cpu, path: {tmp_path}, capacity: 4MiB}}"
    file.write_text(f"{{version: 1, tiers: [{tier}]}}")
    extra: dict[str, Any] = {"stack": str(file)}
    stack = read_stack(extra)
    file.unlink()
    assert read_stack(extra) is stack
    assert unread(extra) == []


def test_a_stack_may_be_written_out(tmp_path: Path) -> None:
    tier = {"kind": "cpu", "path": str(tmp_path), "capacity": "4MiB"}
    stack = read_stack({"stack": {"version": 1, "tiers": [tier]}})
    assert [each.kind for each in stack.tiers] == ["cpu"]


def test_what_should_be_a_number_is_named() -> None:
    assert whole_number({"blocks_per_chunk": "4"}, "blocks_per_chunk") == 4
    for wrong in ("many", None, [2]):
        with pytest.raises(ConfigError, match=r"blocks_per_chunk: is .*whole number"):
            whole_number({"blocks_per_chunk": wrong}, "blocks_per_chunk")
