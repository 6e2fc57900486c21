"""How a medium is looked at from outside.

- `inspector`: the interface and its defaults, what records are worth, and places to measure in.
- `contents`: what an inspector reports, and what should be seen to; safe reads of foreign files.
- `filling`: how a copy reads from one tier and fills another.
"""

from kvtier.inspect.contents import (
    Block,
    Cleared,
    Contents,
    Depth,
    Finding,
    Garbage,
    Hold,
    InspectorContext,
    Level,
    Part,
    Reach,
    Reporter,
    Stored,
)
from kvtier.inspect.filling import CopyAudit, Filling, Source
from kvtier.inspect.inspector import Inspector, Proof, Prover, Verdict

__all__ = [
    "Block",
    "Cleared",
    "Contents",
    "CopyAudit",
    "Depth",
    "Filling",
    "Finding",
    "Garbage",
    "Hold",
    "Inspector",
    "InspectorContext",
    "Level",
    "Part",
    "Proof",
    "Prover",
    "Reach",
    "Reporter",
    "Source",
    "Stored",
    "Verdict",
]
