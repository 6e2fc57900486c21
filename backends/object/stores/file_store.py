"""A folder as an object store: the embedded default, and any file system that several hosts share.

An object is one file. It is written under a temporary name in its own folder and published by
rename, or by hard link if the name must be absent. A crash leaves a temporary file, which `sweep`
removes. Temporary names start with a dot, which no object name does.

Paths are strings here, not `Path`: Python 3.12 up to 3.12.5 never frees the parts of a `Path`, and
every object and every put has parts of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvtier.backends.object import writer_ids
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Conflict,
    Forbidden,
    NoSuchBucket,
    StoreError,
    check_deadline,
    map_os_errors,
)
from kvtier.backends.object.stores.folder_listing import may_hold_names, object_info, walk
from kvtier.backends.object.stores.store import (
    Buffer,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    first_bytes,
    wrong_length,
)
from kvtier.system.disk import Disk, read_all, write_all

_TMP = ".tmp-"
_TMP_OF = re.compile(r"\.tmp-([0-9a-f]{32})-")
_DELETES_AT_ONCE = 32
"""Few enough to end soon on a network file system: the keeper renews its claim in between."""
_ATTEMPTS = 8
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class FileStore(Store):
    """Objects as files below `root`, which is made if its parent exists.

    A power cut may leave recent objects short or empty; the reader's checks find them.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self._root = str(self.root)
        self._parent = os.path.dirname(os.path.abspath(root))
        self._disk = disk or Disk()
        with map_os_errors(self._root):
            self.root.mkdir(mode=0o700, exist_ok=True)
            # Each write checks the right to write.
            if not os.access(self.root, os.R_OK | os.X_OK):
                raise AccessDenied(f"no right to read the folder {self.root}")
            self._mounted = os.stat(self._root).st_dev != os.stat(self._parent).st_dev

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        target = self._path(name)
        check_deadline(deadline, name)
        with map_os_errors(name):
            if if_absent and os.path.exists(target):
                return PutOutcome.ALREADY_THERE
            temporary = self._temporary_for(target)
            try:
                self._write(temporary, buffers)
                return self._publish(temporary, target, if_absent)
            except OSError:
                _remove(temporary)
                self._prune(os.path.dirname(target))
                raise

    def _temporary_for(self, target: str) -> str:
        own = f"{_TMP}{writer_ids.process_writer_id()}-{secrets.token_hex(8)}"
        return os.path.join(os.path.dirname(target), own)

    def _write(self, temporary: str, buffers: Sequence[Buffer]) -> None:
        folder = os.path.dirname(temporary)
        for _ in range(_ATTEMPTS):  # `delete` may remove an empty folder at any time
            with contextlib.suppress(FileNotFoundError):
                self._make_folder(folder)
                fd = self._disk.open(temporary, create=True)
                break
        else:
            raise Conflict(f"{folder} keeps vanishing: others delete there at this moment")
        try:
            write_all(self._disk, fd, buffers, 0)
        finally:
            self._disk.close(fd)  # over a network only this may find the disk full

    def _publish(self, temporary: str, target: str, if_absent: bool) -> PutOutcome:
        if not if_absent:
            self._disk.rename(temporary, target)
            return PutOutcome.STORED
        try:
            os.link(temporary, target)
        except FileExistsError:
            return PutOutcome.ALREADY_THERE
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # this file system has no hard links: the last writer wins
            self._disk.rename(temporary, target)
        finally:
            _remove(temporary)
        return PutOutcome.STORED

    def _make_folder(self, folder: str) -> None:
        if folder == self._root:
            self._device()
        elif not os.path.isdir(folder):
            self._make_folder(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def get(
        self,
        name: str,
        into: Sequence[Buffer],
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        path = self._path(name)
        check_deadline(deadline, name)
        with map_os_errors(name):
            try:
                if not stat.S_ISREG(os.lstat(path).st_mode):  # a link may lead anywhere
                    return None
                fd = self._disk.open_to_read(path)
            except (FileNotFoundError, NotADirectoryError):
                self._device()
                return None
            except PermissionError as error:
                raise Forbidden(f"{name}: give this user the right to read it") from error
            try:
                size = os.fstat(fd).st_size
                room = sum(view.nbytes for view in into)
                wanted = size if offset is None else room
                if wanted > room or wanted > size - (offset or 0):
                    raise wrong_length(name, size)
                found = read_all(self._disk, fd, first_bytes(into, wanted), offset or 0)
                if found != wanted:  # it was cut short meanwhile
                    raise wrong_length(name, found)
            finally:
                self._disk.close(fd)
        return wanted

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        path = self._path(name)
        check_deadline(deadline, name)
        with map_os_errors(name):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                self._device()
                return None
        return object_info(name, found) if stat.S_ISREG(found.st_mode) else None

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        device = self._device()
        start = folder + "/" if folder else ""
        yield from walk(self._root, start, prefix, after, deadline)
        if self._device() != device:
            raise NoSuchBucket(f"{self.root} was another folder a moment ago: is it mounted?")

    def _device(self) -> int:
        """The device of the folder; raises NoSuchBucket if a mounted folder is not mounted any
        more. Its objects are not gone then, and the folder below it is not ours to fill."""
        with map_os_errors(self._root):
            found = os.stat(os.path.join(self._root, "")).st_dev
            if self._mounted and found == os.stat(self._parent).st_dev:
                raise NoSuchBucket(f"{self.root} is not mounted any more: mount it again")
        return found

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        failed: dict[str, StoreError] = {}
        for name in names:
            path = self._path(name)
            try:
                check_deadline(deadline, name)
                with (
                    map_os_errors(name),
                    contextlib.suppress(FileNotFoundError, NotADirectoryError),
                ):
                    self._disk.unlink(path)
                    self._prune(os.path.dirname(path))
            except StoreError as error:
                failed[name] = error
        self._device()
        return failed

    @property
    def deletes_at_once(self) -> int:
        return _DELETES_AT_ONCE

    def _prune(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # not empty, or already gone: both are fine
            while folder != self._root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def sweep(self, older_than_s: float) -> Iterator[int]:
        """Remove temporary files of dead writers; those of this machine at once."""
        for folder, folders, files in os.walk(self._root):
            below = folder[len(self._root) :].lstrip("/")
            folders[:] = [
                name for name in folders if may_hold_names(f"{below}/{name}/".lstrip("/"))
            ]
            removed = 0
            for name in files:
                path = os.path.join(folder, name)
                # it may be gone by now, or another user's
                with contextlib.suppress(OSError):
                    if name.startswith(_TMP) and _is_abandoned(path, older_than_s):
                        os.unlink(path)
                        removed += 1
            yield removed

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))


def _is_abandoned(temporary: str, older_than_s: float) -> bool:
    """Whether the writer is dead. On another machine it counts as dead after that time."""
    writer = _TMP_OF.match(os.path.basename(temporary))
    if writer and not writer_ids.may_live(writer[1]):
        return True
    return time.time() - os.lstat(temporary).st_mtime > older_than_s


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
