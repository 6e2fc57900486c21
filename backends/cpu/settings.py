"""The settings of a CPU tier."""

from __future__ import annotations

from kvtier.settings import Duration, Persistence, TierSettings


class CpuSettings(TierSettings, frozen=True, kw_only=True, tag="cpu"):
    """Blocks in shared memory: the tier that engines copy from and to."""

    path: str = "/dev/shm"
    """The folder, on tmpfs, that holds the region."""
    name: str = "kv"
    """The name of the region: a restarted engine finds its blocks under the same name."""
    persistence: Persistence = Persistence.KEEP
    """Whether the region outlives the process."""
    keep_for: Duration = Duration(7 * 86400.0)
    """If no engine has used the region for this long, the next engine that starts removes it."""
    huge_pages: bool = False
    """Ask for huge pages; if the system gives none, log why and go on without."""
