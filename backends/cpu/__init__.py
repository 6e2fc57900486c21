"""The CPU tier: a named region of shared memory that workers map and that outlives the process.

- `settings`, `backend`: what a stack file says, and how both halves are opened.
- `tier`: the catalogue, and the spec: where blocks are in the region.
- `handler`: the data side: records in place.
- `region`: the mapped file, as every process sees it; `owned_region`: as its owner sees it.
- `region_locks`: who owns a region, and who maps it.
- `leftover_regions`: finds and removes regions that nobody will come back to.
- `region_memory`: which memory a region gets; `early_memory` takes it while an engine starts.
- `huge_page_support`: why a region has no huge pages.
- `sharing`: how workers find their engine's region, and say what of it is pinned.
- `inspection`: the medium seen from outside, for the command line.
"""

from kvtier.backends.cpu.backend import BACKEND, CpuBackend, region_path
from kvtier.backends.cpu.handler import CpuHandler
from kvtier.backends.cpu.region import Region
from kvtier.backends.cpu.settings import CpuSettings
from kvtier.backends.cpu.tier import CpuSpec, CpuTier

__all__ = [
    "BACKEND",
    "CpuBackend",
    "CpuHandler",
    "CpuSettings",
    "CpuSpec",
    "CpuTier",
    "Region",
    "region_path",
]
