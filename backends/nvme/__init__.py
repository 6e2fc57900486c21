"""The NVMe tier: preallocated slabs of aligned slots in a folder, shared by several processes.

Most of it is a folder of slabs (`kvtier.slab`). Here is what a disk needs beside:

- `settings`, `backend`: what a stack file says, and how both halves are opened.
- `tier`: the catalogue, which meters what is written.
- `medium`: the data side: records and their entries, by direct I/O.
- `write_budget`, `drives`: how much may be written, and what the drive says of that.
- `inspect`: the medium seen from outside, for the command line.
"""

from kvtier.backends.nvme.backend import BACKEND, NvmeBackend
from kvtier.backends.nvme.medium import NvmeHandler, NvmeSpec
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.tier import NvmeTier

__all__ = [
    "BACKEND",
    "NvmeBackend",
    "NvmeHandler",
    "NvmeSettings",
    "NvmeSpec",
    "NvmeTier",
]
