"""How a medium is looked at from outside.

- `inspector`: the interface and its defaults.
- `contents`: what an inspector reports, and what should be seen to; safe reads of foreign files.
- `proofs`: what records are worth.
- `filling`: how a copy reads from one tier and fills another.
- `measuring`: places to measure in.
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
from kvtier.inspect.inspector import Inspector
from kvtier.inspect.proofs import Proof, Prover, Verdict

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
