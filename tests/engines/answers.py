"""What engines answer, compared; and prompts that one engine computes for another."""

from __future__ import annotations

from typing import Any

from engines.engine import Engine

MARGIN = 1e-3
"""Of log-probabilities, in float32."""
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}


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
