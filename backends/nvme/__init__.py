"""The NVMe tier: preallocated slabs of aligned slots in a folder, shared by several processes.

- `settings`, `backend`: what a stack file says, and how both halves are opened.
- `tier`: the catalogue. `slot_numbering` numbers the slots of all slabs through, `duplicate_blocks`
  notes second copies, `single_thread` keeps the catalogue to one thread at a time.
- `handler`: the data side: records and their entries, by direct I/O.
- `open_slabs`: the files that the handler has open, and the owners that it acts for.
- `spec`: where blocks are, in the words of this medium.
- `table_writes`: entries written into a slab's table.
- `folder`: the folder on disk: names, slabs, owners and the lock.
- `housekeeping`: what is done on disk off the scheduler's thread.
- `wear`: how much may be written, and what the drive says of that.
- `inspection`: the medium seen from outside, for the command line.
"""

from kvtier.backends.nvme.backend import BACKEND, NvmeBackend
from kvtier.backends.nvme.handler import NvmeHandler
from kvtier.backends.nvme.settings import NvmeSettings, slab_bytes
from kvtier.backends.nvme.spec import NvmeSpec
from kvtier.backends.nvme.tier import NvmeTier

__all__ = [
    "BACKEND",
    "NvmeBackend",
    "NvmeHandler",
    "NvmeSettings",
    "NvmeSpec",
    "NvmeTier",
    "slab_bytes",
]
