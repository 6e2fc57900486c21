"""Prompts that one engine computes and another goes on with, by way of a tier that both have.

A router sends a prompt to an engine that is to compute it, and sends what that one answers in
`kv_transfer_params` with the same prompt to another, which waits a little for the blocks. These are
the words of vLLM's connectors from engine to engine, so that routers made for them will do.
"""

from __future__ import annotations

from collections.abc import Mapping

_COMPUTE, _EXPECT = "do_remote_decode", "do_remote_prefill"


def is_expected(said: object) -> bool:
    """Whether another engine has computed the prompt of a request that came with this."""
    return _says(said, _EXPECT)


def answer(said: object) -> dict[str, bool] | None:
    """What to tell the engine that goes on with the prompt of a request that came with this; None
    if there is none."""
    return {_EXPECT: True, _COMPUTE: False} if _says(said, _COMPUTE) else None


def _says(said: object, name: str) -> bool:
    return isinstance(said, Mapping) and said.get(name) is True
