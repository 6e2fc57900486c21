"""The CPU tier: slabs of shared memory, which the engines of a stack map and that outlive them.

Most of it is a folder of slabs (`kvtier.slab`), on tmpfs. Here is what memory needs beside:

- `folder`: settings, where the folder is, how its files get memory, and when it goes.
- `memory`: addresses for slots, near which GPUs memory lies, in what pages, and when it is taken.
- `medium`: what all processes of an engine map: its mark, and the slabs that this names.
- `tier`: the catalogue, which writes entries through its mappings.
- `backend`: how both halves are opened.
- `inspect`: the medium seen from outside, for the command line.
"""

from kvtier.backends.cpu.backend import BACKEND, CpuBackend
from kvtier.backends.cpu.folder import CpuSettings
from kvtier.backends.cpu.medium import CpuHandler, CpuSpec, Region
from kvtier.backends.cpu.tier import CpuTier

__all__ = [
    "BACKEND",
    "CpuBackend",
    "CpuHandler",
    "CpuSettings",
    "CpuSpec",
    "CpuTier",
    "Region",
]
