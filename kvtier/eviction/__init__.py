"""Which blocks must go when a tier is full (docs/how_it_works/eviction.md).

- `policy`: the interface, the registry that finds policies by name, other packages' too, and `lru`.
- `adaptive`: the default policy; `forecast`: what it learns with.
- `retention`: which blocks go after all others, for whom and for how long.
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
