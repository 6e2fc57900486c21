"""How a medium is looked at from outside: the interface of inspectors, and what they share.

`inspector.py` is the interface and its defaults. `contents.py` has what an inspector reports,
`findings.py` what should be seen to, `proofs.py` what records are worth. `sources.py` reads blocks
for a copy, `filling.py` is how a copy fills a tier. `measuring.py` makes places to measure in,
`media_files.py` reads files that nobody vouches for. What slabs share is in `kvtier/slab/`.
"""

from kvtier.core.inspection.contents import (
    Block,
    Cleared,
    Contents,
    Depth,
    Hold,
    InspectorContext,
    Part,
    Reach,
    Reporter,
    Stored,
)
from kvtier.core.inspection.filling import CopyAudit, Filling
from kvtier.core.inspection.findings import Finding, Garbage, Level
from kvtier.core.inspection.inspector import Inspector
from kvtier.core.inspection.proofs import Proof, Prover, Verdict
from kvtier.core.inspection.sources import Source

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
