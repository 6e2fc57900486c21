"""A folder as an object store: the embedded default, and any file system that several hosts share.

An object is one file. It is written under a temporary name in its own folder and published by
rename, or by hard link if the name must be absent. A crash leaves a temporary file, which `sweep`
removes. Temporary names start with a dot, which no object name does.

Only the folder itself is found by its path, which may lead over links. Below it, each part of a
name is opened in the folder that was opened before, and is no link: whatever anybody plants there,
nothing outside is read, written or deleted.

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
from typing import NamedTuple

from kvtier.backends.object import writer_ids
from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.store import (
    Buffer,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    is_name,
    wrong_length,
)
from kvtier.system.disk import Disk, read_all, write_all

_TMP = ".tmp-"
_TMP_OF = re.compile(r"\.tmp-([0-9a-f]{32})-")
_DELETES_AT_ONCE = 32
"""Few enough to end soon on a network file system: the caretaker confirms its lease in between."""
_ATTEMPTS = 8
_SCANS_MAX = 8
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_ABSENT = (FileNotFoundError, NotADirectoryError)
"""There is no such file, or a part of its name is no folder."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FileStore(Store):
    """Objects as files below `root`, which is made if its parent exists.

    A power cut may leave recent objects short or empty; the reader's checks find them.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self._root = str(self.root)
        self._parent = os.path.dirname(os.path.abspath(root))
        self._disk = disk or Disk()
        with errors.map_os_errors(self._root):
            self.root.mkdir(mode=0o700, exist_ok=True)
            # Each write checks the right to write.
            if not os.access(self.root, os.R_OK | os.X_OK):
                raise errors.AccessDenied(f"no right to read the folder {self.root}")
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
        folder, _, file = check_name(name).rpartition("/")
        errors.check_deadline(deadline, name)
        with errors.map_os_errors(self._path(name)):
            for _ in range(_ATTEMPTS):  # `delete` may remove an empty folder at any time
                with contextlib.suppress(FileNotFoundError), self._opened(folder, make=True) as fd:
                    return self._put(fd, folder, file, buffers, if_absent)
        self._device()
        raise errors.Conflict(f"{folder} keeps vanishing: others delete there at this moment")

    def _put(
        self, folder_fd: int, folder: str, file: str, buffers: Sequence[Buffer], if_absent: bool
    ) -> PutOutcome:
        if if_absent and (found := _status(folder_fd, file)) is not None:
            if stat.S_ISREG(found.st_mode):
                return PutOutcome.ALREADY_THERE
            if_absent = False  # a link, say, which is no object and has no right to its name
        temporary = f"{_TMP}{writer_ids.process_writer_id()}-{secrets.token_hex(8)}"
        try:
            fd = self._disk.open(_within(folder_fd, temporary), create=True)
            try:
                write_all(self._disk, fd, buffers, 0)
            finally:
                self._disk.close(fd)  # over a network only this may find the disk full
            return self._publish(folder_fd, temporary, file, if_absent)
        except OSError:
            _remove(folder_fd, temporary)
            self._prune(folder)
            raise

    def _publish(self, folder_fd: int, temporary: str, file: str, if_absent: bool) -> PutOutcome:
        source, target = _within(folder_fd, temporary), _within(folder_fd, file)
        if not if_absent:
            self._disk.rename(source, target)
            return PutOutcome.STORED
        both = {"src_dir_fd": folder_fd, "dst_dir_fd": folder_fd}
        try:
            os.link(temporary, file, **both, follow_symlinks=False)
        except FileExistsError:
            return PutOutcome.ALREADY_THERE
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # this file system has no hard links: the last writer wins
            self._disk.rename(source, target)
        finally:
            _remove(folder_fd, temporary)
        return PutOutcome.STORED

    def get(
        self,
        name: str,
        into: Buffer,
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        folder, _, file = check_name(name).rpartition("/")
        errors.check_deadline(deadline, name)
        with errors.map_os_errors(self._path(name)):
            try:
                with self._opened(folder) as folder_fd:
                    found = _status(folder_fd, file)
                    if found is None or not stat.S_ISREG(found.st_mode):
                        self._device()
                        return None
                    fd = self._disk.open_to_read(_within(folder_fd, file))
            except PermissionError as error:
                raise errors.Forbidden(f"{name}: give this user the right to read it") from error
            except _ABSENT:
                self._device()
                return None
            try:
                size = os.fstat(fd).st_size
                wanted = size if offset is None else len(into)
                if wanted > len(into) or wanted > size - (offset or 0):
                    raise wrong_length(name, size)
                done = read_all(self._disk, fd, [into[:wanted]], offset or 0)
                if done != wanted:  # it was cut short meanwhile
                    raise wrong_length(name, done)
            finally:
                self._disk.close(fd)
        return wanted

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        folder, _, file = check_name(name).rpartition("/")
        errors.check_deadline(deadline, name)
        with (
            errors.map_os_errors(self._path(name)),
            contextlib.suppress(*_ABSENT),
            self._opened(folder) as fd,
        ):
            found = _status(fd, file)
            if found is not None:
                return _info(name, found) if stat.S_ISREG(found.st_mode) else None
        self._device()
        return None

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        device = self._device()
        with contextlib.suppress(*_ABSENT), self._opened(folder) as fd:
            start = folder + "/" if folder else ""
            yield from self._walk(fd, start, prefix, after, deadline)
        if self._device() != device:
            raise errors.NoSuchBucket(
                f"{self.root} was another folder a moment ago: is it mounted?"
            )

    def _walk(
        self, fd: int, folder: str, prefix: str, after: str, deadline: float | None
    ) -> Iterator[ObjectInfo]:
        """The objects in and below a folder, depth first.

        A folder is sorted by its name and a slash, which gives the order of the full names.
        """
        errors.check_deadline(deadline, folder)
        for name, status in self._scan(fd, folder):
            if status is None:
                relevant = name.startswith(prefix) and _may_hold_names(name)
                if not relevant or not (name > after or after.startswith(name)):
                    continue
                with errors.map_os_errors(self._path(name)):
                    try:
                        inner = _open_folder(fd, name[len(folder) : -1])
                    except _ABSENT:
                        continue
                try:
                    yield from self._walk(inner, name, prefix, after, deadline)
                finally:
                    os.close(inner)
            elif name.startswith(prefix) and name > after and is_name(name):
                yield _info(name, status)

    def _scan(self, fd: int, folder: str) -> Sequence[_Entry]:
        """The entries of one folder, in order.

        An entry that vanishes during a scan may have been replaced by one that the scan has not
        seen. So the folder is scanned again until nothing vanishes, a limited number of times.
        """
        found: list[_Entry | None] = []
        with errors.map_os_errors(self._path(folder)):
            for _ in range(_SCANS_MAX):
                found = list(_entries(fd, folder))
                if None not in found:
                    break
        return sorted(filter(None, found), key=lambda one: one.name)

    def _path(self, name: str) -> str:
        """Where an object or a folder of the store lies, for people."""
        return os.path.join(self._root, name)

    def _device(self) -> int:
        """The device of the folder; raises NoSuchBucket if a mounted folder is not mounted any
        more. Its objects are not gone then, and the folder below it is not ours to fill."""
        with errors.map_os_errors(self._root):
            found = os.stat(os.path.join(self._root, "")).st_dev
            if self._mounted and found == os.stat(self._parent).st_dev:
                raise errors.NoSuchBucket(f"{self.root} is not mounted any more: mount it again")
        return found

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, errors.StoreError]:
        failed: dict[str, errors.StoreError] = {}
        for name in names:
            folder, _, file = check_name(name).rpartition("/")
            try:
                errors.check_deadline(deadline, name)
                with errors.map_os_errors(self._path(name)), contextlib.suppress(*_ABSENT):
                    with self._opened(folder) as fd:
                        self._disk.unlink(_within(fd, file))
                    self._prune(folder)
            except errors.StoreError as error:
                failed[name] = error
        self._device()
        return failed

    @property
    def deletes_at_once(self) -> int:
        return _DELETES_AT_ONCE

    def _prune(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # not empty, or already gone: both are fine
            while folder:
                folder, _, last = folder.rpartition("/")
                with self._opened(folder) as fd:
                    os.rmdir(last, dir_fd=fd)

    def sweep(self, older_than_s: float) -> Iterator[int]:
        """Remove temporary files of dead writers; those of this machine at once."""
        with errors.map_os_errors(self._root), self._opened("") as root:
            for folder, folders, files, fd in os.fwalk(".", dir_fd=root):
                below = folder[2:]
                folders[:] = [
                    name for name in folders if _may_hold_names(f"{below}/{name}/".lstrip("/"))
                ]
                removed = 0
                for name in files:
                    # it may be gone by now, or another user's
                    with contextlib.suppress(OSError):
                        if name.startswith(_TMP) and _is_abandoned(fd, name, older_than_s):
                            os.unlink(name, dir_fd=fd)
                            removed += 1
                yield removed

    @contextlib.contextmanager
    def _opened(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of this folder of the store. Raises FileNotFoundError if it is not there,
        unless `make`, and NotADirectoryError if a part of it is none of ours."""
        fd = os.open(self._root, _FOLDER)
        try:
            if make and not folder:
                self._device()
            for part in folder.split("/") if folder else ():
                try:
                    inner = _open_folder(fd, part)
                except FileNotFoundError:
                    if not make:
                        raise
                    self._device()
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=fd)
                    inner = _open_folder(fd, part)
                except NotADirectoryError as error:
                    if not make:
                        raise
                    raise errors.InvalidName(
                        f"{folder}: the place of {part} is taken by something else: remove it"
                    ) from error
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


class _Entry(NamedTuple):
    name: str
    """The full name; that of a folder ends with a slash."""
    status: os.stat_result | None
    """None for a folder."""


def _entries(fd: int, folder: str) -> Iterator[_Entry | None]:
    """The entries of one folder; None for one that vanishes."""
    with os.scandir(fd) as entries:
        for entry in entries:
            if not is_name(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield _Entry(f"{folder}{entry.name}/", None)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                yield None
                continue
            if stat.S_ISREG(status.st_mode):
                yield _Entry(folder + entry.name, status)


def _open_folder(fd: int, name: str) -> int:
    """A folder within another; raises NotADirectoryError if it is a link or a file."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
        raise


def _within(fd: int, name: str) -> str:
    """The path of a name in a folder that is open, for `Disk`: wherever that folder is by now."""
    return f"/proc/self/fd/{fd}/{name}"


def _status(fd: int, name: str) -> os.stat_result | None:
    """What has this name in a folder, links not followed; None if nothing has."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    return None


def _info(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, status.st_mtime)


def _may_hold_names(folder: str) -> bool:
    """Whether an object may lie in this folder. Folders of others may be deeper than any name."""
    return is_name(f"{folder}x")


def _is_abandoned(fd: int, temporary: str, older_than_s: float) -> bool:
    """Whether the writer is dead. On another machine it counts as dead after that time."""
    writer = _TMP_OF.match(temporary)
    if writer and not writer_ids.may_live(writer[1]):
        return True
    return (
        time.time() - os.stat(temporary, dir_fd=fd, follow_symlinks=False).st_mtime > older_than_s
    )


def _remove(fd: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=fd)
