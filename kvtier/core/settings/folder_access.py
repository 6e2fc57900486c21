"""Whether a tier may keep its files in a folder, said before anything is opened."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvtier.errors import ConfigError, NotWritable

_SHORT = re.compile(r"^~(?=/|$)|\$([A-Za-z_][A-Za-z0-9_]*)")
"""What a shell would replace."""

WHOSE = "give it to the user of the engines (chown -R), and run what copies into it as that user"
"""What to do about a folder of another user's."""


def standing_folder(folder: Path, place: str, *, only_read: bool = False) -> Path:
    """The folder, or the one it will be made in; raises NotWritable if nothing can be kept there.

    `place` names the setting that it comes from. One that is there may be `only_read`.
    """
    standing = folder if folder.exists() else folder.parent
    if standing is not folder and (short := _SHORT.search(str(folder))):
        meant = _SHORT.sub(lambda found: f"${{{found[1] or 'HOME'}}}", str(folder))
        raise ConfigError(place, f"{short[0]} stands for nothing here", f'write "{meant}"')
    if folder.is_symlink() and standing is not folder:
        problem = f"{folder} is a link to a folder that is not there"
        raise NotWritable(place, problem, f"make {folder.readlink()}, or correct the link")
    if not standing.is_dir():
        raise NotWritable(place, f"{standing} is not a folder", "make it, or name one that exists")
    if only_read and standing is folder:
        return standing
    if not os.access(standing, os.W_OK | os.X_OK):
        read_only = os.statvfs(standing).f_flag & os.ST_RDONLY
        if read_only:
            problem = f"{standing} is mounted read-only"
            raise NotWritable(place, problem, "mount it writable, or name another folder")
        raise NotWritable(place, f"no right to write in {standing}", "change its owner")
    return standing
