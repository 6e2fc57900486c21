"""Policies by name: ours, and whatever is installed under the entry point `kvtier.eviction`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kvtier.core.eviction.policy import EvictionPolicy
from kvtier.errors import ConfigError

GROUP = "kvtier.eviction"
DEFAULT = "adaptive"

_OURS = {
    "adaptive": "kvtier.core.eviction.adaptive.policy:Adaptive",
    "lru": "kvtier.core.eviction.lru:LRU",
}


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OURS}


def policy_names() -> list[str]:
    """Every name that `create_policy` knows; ours cannot be replaced by another's."""
    return sorted([*_OURS, *_others()])


@cache
def policy_class(name: str) -> type[EvictionPolicy]:
    """Import the policy of this name; raises ConfigError if there is none or it is broken."""
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        found: object = getattr(import_module(module), attribute)
    elif name in _others():
        try:
            found = _others()[name].load()
        except Exception as error:  # whatever its package raises
            raise ConfigError(
                ".eviction",
                f"the eviction policy {name!r} cannot be imported: {error}",
                "reinstall the package that brings it",
            ) from error
    else:
        raise ConfigError(
            ".eviction",
            f"there is no eviction policy {name!r}",
            f"write one of {', '.join(policy_names())}",
        )
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(
            ".eviction",
            f"what is installed as {name!r} is no EvictionPolicy: {found!r}",
            f"its entry point in the group {GROUP} must name a subclass",
        )
    return found


def create_policy(name: str = DEFAULT, slots: int = 0) -> EvictionPolicy:
    """A new policy of this name for a tier of `slots` slots."""
    return policy_class(name)(slots)
