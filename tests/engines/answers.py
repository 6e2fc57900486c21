"""What engines answer, compared; and prompts that one engine computes for another."""

from __future__ import annotations

from typing import Any

from engines.engine import Engine
from engines.world import prompt

MARGIN = 1e-3
"""Of log-probabilities, in float32."""
_LENGTHS = (1100, 600)
HITS = [1024, 512]
"""What is found of `prompts`: whole chunks."""
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}


def prompts(seed: int) -> list[list[int]]:
    return [prompt(seed + at, length) for at, length in enumerate(_LENGTHS)]


def ask(engine: Engine, asked: list[list[int]]) -> list[dict[str, Any]]:
    """One after the other: their sums are the same whatever else is asked."""
    return [engine.generate(prompts=[each])[0] for each in asked]


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]], hits: list[int]) -> None:
    """So many tokens were found, and the answers are equal up to where the two best tokens are
    nearly as good (`weigh` of hosts/scored.py says where)."""
    assert [each["cached"] for each in found] == hits
    for one, other in zip(found, expected, strict=True):
        close = [at for at, margin in enumerate(other["margins"]) if margin < MARGIN]
        sure = min(close, default=len(other["tokens"]))
        assert one["tokens"][:sure] == other["tokens"][:sure]


def hand_over(computes: Engine, answers: Engine, prompt: list[int]) -> dict[str, Any]:
    """As a router lets one engine compute a prompt, and another go on with it."""
    said = computes.generate_with(prompt=prompt, tokens=1, limits=COMPUTE)["transfer"]
    del said["remote_prefill_cached_tokens"]  # of which vLLM tells in place of hits
    answers.begin(prompt=prompt, tokens=16, limits=said)
    computes.settle()
    answered: dict[str, Any] = answers.end()
    return answered
