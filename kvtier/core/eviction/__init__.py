"""Which blocks must go when a tier is full (docs/how_it_works/eviction.md).

- `policy`: the interface; `registry` finds policies by name, those of other packages too.
- `adaptive`: the default policy, with the parts that it learns with.
- `lru`: the classic policy, made of `slot_lists`.
"""

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
