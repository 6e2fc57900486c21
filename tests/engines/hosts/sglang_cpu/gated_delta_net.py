"""Gated delta net and its convolution in plain torch: what SGLang's compiled kernels compute, one
token after the other.

Each sequence has a slot in the pools of states, which is read before its first token, and written
after its last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import normalize, silu, softplus

CHUNK = 64


def gates(decay: Any, a: Any, b: Any, bias: Any) -> tuple[Any, Any]:
    """How much of a state is kept (its logarithm), and how much of a token goes into it."""
    kept = -decay.float().exp() * softplus(a.float() + bias.float())
    return kept[None], b.float().sigmoid()[None]


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *_: Any,
    conv_states: Any,
    cache_indices: Any,
    has_initial_state: Any,
    query_start_loc: Any,
    **__: Any,
) -> Any:
    """`x` has the tokens of all sequences in its last dimension."""
    found = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for at, (slot, known) in enumerate(
        zip(cache_indices.tolist(), has_initial_state.tolist(), strict=True)
    ):
        span = slice(ends[at], ends[at + 1])
        state = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        found[:, span], conv_states[slot] = convolve(x[:, span], state, weight, bias)
    return found


def causal_conv1d_update(
    x: Any,
    conv_states: Any,
    weight: Any,
    bias: Any = None,
    *_: Any,
    conv_state_indices: Any,
    **__: Any,
) -> Any:
    """One token of each sequence."""
    found = torch.empty_like(x)
    for at, slot in enumerate(conv_state_indices.tolist()):
        one, conv_states[slot] = convolve(x[at, :, None], conv_states[slot], weight, bias)
        found[at] = one[:, 0]
    return found


def convolve(x: Any, state: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    seen = torch.cat([state.to(x.dtype), x], dim=1)
    windows = seen.unfold(1, weight.shape[1], 1)
    found = (windows * weight[:, None]).sum(-1)
    if bias is not None:
        found += bias[:, None]
    return silu(found), seen[:, -state.shape[1] :]


def chunk_gated_delta_rule(
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    initial_state_indices: Any,
    cu_seqlens: Any,
    **_: Any,
) -> tuple[Any, None, Any]:
    """What it says, and the states before every chunk of 64 tokens."""
    found, chunks = torch.empty_like(v), []
    repeated = v.shape[2] // k.shape[2]
    query = normalize(q[0].float(), dim=-1).repeat_interleave(repeated, 1) * q.shape[-1] ** -0.5
    key = normalize(k[0].float(), dim=-1).repeat_interleave(repeated, 1)
    for slot, span in sequences(initial_state_indices, cu_seqlens):
        state = initial_state[slot].float()  # of each head: its values by its keys
        for at in span:
            if (at - span.start) % CHUNK == 0:
                chunks.append(state)
            state = state * g[0, at].exp()[:, None, None]
            known = (state @ key[at, :, :, None])[..., 0]
            fresh = (v[0, at].float() - known) * beta[0, at][:, None]
            state = state + fresh[:, :, None] * key[at, :, None]
            found[0, at] = (state @ query[at, :, :, None])[..., 0].to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return found, None, torch.stack(chunks)[None]


def sequences(slots: Any, ends: Any) -> Iterator[tuple[int, range]]:
    for slot, (first, last) in zip(slots.tolist(), pairwise(ends.tolist()), strict=True):
        yield slot, range(first, last)


def delta_rule_update(
    *, dt_bias: Any, a: Any, b: Any, initial_state_source: Any, **named: Any
) -> Any:
    """One token of each sequence."""
    kept, taken = gates(named.pop("A_log"), a, b, dt_bias)
    named |= {"g": kept, "beta": taken, "initial_state": initial_state_source}
    return chunk_gated_delta_rule(**named)[0]


def norm_and_gate(x: Any, weight: Any, gate: Any, epsilon: float) -> Any:
    wide = x.float()
    normal = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (normal * weight.float() * silu(gate.float())).to(x.dtype)


def track_states(
    conv: Any, states: Any, sources: Any, mask: Any, targets: Any, batch: int, *_: Any, **__: Any
) -> None:
    """Copy the states of these requests, of all layers, to where the next ones will find them."""
    tracked = mask[:batch]
    sources, targets = sources[:batch][tracked], targets[:batch][tracked]
    for pool in (conv, states):
        pool[:, targets] = pool[:, sources]


MAMBA = {
    "causal_conv1d_fn_cpu": causal_conv1d,
    "causal_conv1d_update_cpu": causal_conv1d_update,
    "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule,
}
"""Names of `sgl_kernel.mamba`."""
OPS = {
    "fused_gdn_gating_cpu": gates,
    "fused_rmsnorm_gated_cpu": norm_and_gate,
    "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_update,
}
"""Names of `torch.ops.sgl_kernel`."""
