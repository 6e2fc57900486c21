"""Which blocks must go when a tier is full (see docs/EVICTION.md)."""

from kvtier.core.eviction.policy import UNKNOWN, EvictionPolicy
from kvtier.core.eviction.registry import DEFAULT, create_policy, policy_class, policy_names

__all__ = [
    "DEFAULT",
    "UNKNOWN",
    "EvictionPolicy",
    "create_policy",
    "policy_class",
    "policy_names",
]
