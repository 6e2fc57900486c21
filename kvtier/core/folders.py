"""Whether a tier may keep its files in a folder, said before anything is opened."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.errors import ConfigError, NotWritable


def standing_folder(folder: Path, place: str) -> Path:
    """The folder, or the one it will be made in; raises ConfigError if nothing can be kept there,
    NotWritable if only this user or this mount is in the way.

    `place` names the setting that it comes from.
    """
    standing = folder if folder.exists() else folder.parent
    if folder.parts[:1] == ("~",) and standing is not folder:
        meant = "/".join(("${HOME}", *folder.parts[1:]))
        raise ConfigError(place, "~ stands for nothing here", f'write "{meant}"')
    if not standing.is_dir():
        raise ConfigError(place, f"{standing} is not a folder", "make it, or name one that exists")
    if not os.access(standing, os.W_OK | os.X_OK):
        read_only = os.statvfs(standing).f_flag & os.ST_RDONLY
        if read_only:
            problem = f"{standing} is mounted read-only"
            raise NotWritable(place, problem, "mount it writable, or name another folder")
        raise NotWritable(place, f"no right to write in {standing}", "change its owner")
    return standing
