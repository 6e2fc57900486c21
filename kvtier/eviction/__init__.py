"""Which blocks must go when a tier is full (docs/how_it_works/eviction.md).

- `policy`: the interface, and the registry that finds policies by name, other packages' too.
- `adaptive`: the default policy; `forecast`: what it learns with.
- `lru`: least recently used.
- `traces`: replays of request traces, for `kvtier plan` and the benchmarks.
"""

from kvtier.eviction.policy import (
    DEFAULT,
    UNKNOWN,
    EvictionPolicy,
    create_policy,
    policy_class,
    policy_names,
)

__all__ = [
    "DEFAULT",
    "UNKNOWN",
    "EvictionPolicy",
    "create_policy",
    "policy_class",
    "policy_names",
]
