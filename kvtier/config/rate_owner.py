"""Where the rates of a stack's engine are kept, and whose they are."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from kvtier.config.stack_config import StackConfig
from kvtier.core.costs.kept_rates import Owner
from kvtier.core.interfaces.backend import backend

_RANKS = ("tensor_parallel", "pipeline_parallel")
_MODEL = ("model", "model_config", "dtype", "quantization", "kv_dtype")
_TEXT_MAX = 1000


def rates_folder(config: StackConfig) -> Path | None:
    """The folder; None if nothing is to be kept, or no home is known."""
    if not config.rates.keep:
        return None
    named = config.rates.path if config.rates.path != "auto" else ""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # which counts for nothing, says its specification
        state = Path("~/.local/state")
    try:
        return Path(named or state / "kvtier" / "rates").expanduser()
    except RuntimeError:  # nobody knows a home
        return None


def machine() -> str:
    """What this machine is called."""
    return platform.node()


def stack_of(config: StackConfig) -> str:
    """The kinds of its tiers, and a digest of where they are."""
    places = [f"{each.kind} {backend(each.kind).identity(each)}" for each in config.tiers]
    digest = hashlib.sha256("\n".join(places).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{', '.join(each.kind for each in config.tiers)} ({digest})"


def rate_owner(config: StackConfig, facts: Mapping[str, str]) -> Owner:
    """Whose the rates of an engine are whose namespace has these facts."""
    device = [facts.get("platform", "a device")]
    device += [f"{name} {facts[name]}" for name in _RANKS if facts.get(name, "1") != "1"]
    model = [facts[name] for name in _MODEL if name in facts]
    return Owner(
        machine(), " ".join(device)[:_TEXT_MAX], " ".join(model)[:_TEXT_MAX], stack_of(config)
    )
