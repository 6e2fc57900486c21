"""A folder as an object store: the embedded default, and any file system that several hosts share.

An object is one file. It is written under a temporary name in its own folder and published by
rename, or by hard link where the name must be absent; a crash leaves a temporary file that
`sweep` removes. Temporary names start with a dot, which no object name does.

Files are named by strings: Python 3.12 up to 3.12.5 keeps the parts of every `Path` for ever, and
there is a new one for every object, and for every put.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.backends.object.budget import writers
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    Conflict,
    Forbidden,
    InvalidName,
    NoSuchBucket,
    StoreError,
    StoreFull,
    TimedOut,
    Unavailable,
)
from kvtier.backends.object.stores.store import (
    Buffer,
    GetOutcome,
    ObjectInfo,
    PutOutcome,
    Store,
    check_name,
    check_prefix,
    first_bytes,
    is_name,
    wrong_length,
)
from kvtier.core.system.disk import Disk, read_all, write_all

_TMP = ".tmp-"
_TMP_OF = re.compile(r"\.tmp-([0-9a-f]{32})-")
_SCANS_MAX = 8
_DELETES_AT_ONCE = 32
"""Few enough to end soon where each takes a network's time: in between claims are renewed."""
_TRIES = 8
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class FileStore(Store):
    """Objects as files below `root`, which is made if its parent exists.

    A power cut may cost recent objects: a short or empty file is caught by the reader's checks.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self._root = str(self.root)
        self._above = os.path.dirname(os.path.abspath(root))
        self._disk = disk or Disk()
        with _mapped(self._root):
            self.root.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self.root, os.R_OK | os.X_OK):  # what writes is refused where it does
                raise AccessDenied(f"no right to read the folder {self.root}")
            self._mounted = os.stat(self._root).st_dev != os.stat(self._above).st_dev

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
        _check_deadline(deadline, name)
        with _mapped(name):
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
        own = f"{_TMP}{writers.this_process()}-{secrets.token_hex(8)}"
        return os.path.join(os.path.dirname(target), own)

    def _write(self, temporary: str, buffers: Sequence[Buffer]) -> None:
        folder = os.path.dirname(temporary)
        for _ in range(_TRIES):  # a folder that `delete` found empty may vanish between two calls
            with contextlib.suppress(FileNotFoundError):
                self._make_folder(folder)
                fd = self._disk.open(temporary, create=True)
                break
        else:
            raise Conflict(f"{folder} keeps vanishing: others delete there at this moment")
        try:
            write_all(self._disk, fd, buffers, 0)
        finally:
            self._disk.close(fd)  # over a network this may be what finds the disk full

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
            # this file system cannot refuse: the last writer wins
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
    ) -> GetOutcome:
        wanted = sum(view.nbytes for view in into)

        def fits(size: int) -> bool:
            return size == wanted if offset is None else size - offset >= wanted

        found = self._read(name, into, offset or 0, fits, deadline)
        return GetOutcome.MISSING if found is None else GetOutcome.FOUND

    def get_up_to(
        self, name: str, into: Sequence[Buffer], *, deadline: float | None = None
    ) -> int | None:
        room = sum(view.nbytes for view in into)
        return self._read(name, into, 0, lambda size: size <= room, deadline)

    def _read(
        self,
        name: str,
        into: Sequence[Buffer],
        offset: int,
        fits: Callable[[int], bool],
        deadline: float | None,
    ) -> int | None:
        """Read from `offset` on as much as there is and fits; how much, None if there is none."""
        path = self._path(name)
        _check_deadline(deadline, name)
        with _mapped(name):
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
                wanted = min(sum(view.nbytes for view in into), size - offset)
                some = first_bytes(into, wanted)
                if not fits(size) or read_all(self._disk, fd, some, offset) != wanted:
                    raise wrong_length(name, size)
            finally:
                self._disk.close(fd)
        return wanted

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        path = self._path(name)
        _check_deadline(deadline, name)
        with _mapped(name):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                self._device()
                return None
        return _info(name, found) if stat.S_ISREG(found.st_mode) else None

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        device = self._device()
        yield from self._walk(folder + "/" if folder else "", prefix, after, deadline)
        if self._device() != device:
            raise NoSuchBucket(f"{self.root} was another folder a moment ago: is it mounted?")

    def _device(self) -> int:
        """Where the folder lies; raises NoSuchBucket if it is away, as what is mounted may be: what
        is missing then is not gone, and what it was mounted on not ours to fill."""
        with _mapped(self._root):
            found = os.stat(os.path.join(self._root, "")).st_dev
            if self._mounted and found == os.stat(self._above).st_dev:
                raise NoSuchBucket(f"{self.root} is not mounted any more: mount it again")
        return found

    def _walk(
        self, folder: str, prefix: str, after: str, deadline: float | None
    ) -> Iterator[ObjectInfo]:
        """Depth first, a folder sorted as its name and a slash: the order of the full names."""
        _check_deadline(deadline, folder)
        for name, status in self._scan(folder):
            if status is None:
                relevant = name.startswith(prefix) and _holds_names(name)
                if relevant and (name > after or after.startswith(name)):
                    yield from self._walk(name, prefix, after, deadline)
            elif name.startswith(prefix) and name > after and is_name(name):
                yield _info(name, status)

    def _scan(self, folder: str) -> Sequence[_Found]:
        """What a folder holds, in order; folders end with a slash and have no status.

        What vanishes while it is read may have been replaced by what is not seen yet: as long as
        that happens, the folder is read again. In one where it happens always, all else is told.
        """
        found: list[_Found | None] = []
        for _ in range(_SCANS_MAX):
            found = []
            with _mapped(os.path.join(self._root, folder)):
                try:
                    found.extend(self._entries(folder))
                except NotADirectoryError:
                    return []
                except FileNotFoundError:  # the folder itself
                    if os.path.isdir(os.path.join(self._root, folder)):
                        continue
            if None not in found:
                break
        return sorted(filter(None, found), key=lambda one: one.name)

    def _entries(self, folder: str) -> Iterator[_Found | None]:
        """What a folder holds; None for what vanishes."""
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in entries:
                if not is_name(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield _Found(f"{folder}{entry.name}/", None)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    yield None
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield _Found(folder + entry.name, status)

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        failed: dict[str, StoreError] = {}
        for name in names:
            path = self._path(name)
            try:
                _check_deadline(deadline, name)
                with _mapped(name), contextlib.suppress(FileNotFoundError, NotADirectoryError):
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
        """Temporary files are what a crash leaves behind; those of this machine go at once."""
        for folder, folders, files in os.walk(self._root):
            below = folder[len(self._root) :].lstrip("/")
            folders[:] = [name for name in folders if _holds_names(f"{below}/{name}/".lstrip("/"))]
            removed = 0
            for name in files:
                path = os.path.join(folder, name)
                # gone in the meantime, or another user's: not ours to remove
                with contextlib.suppress(OSError):
                    if name.startswith(_TMP) and _is_abandoned(path, older_than_s):
                        os.unlink(path)
                        removed += 1
            yield removed

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))


class _Found(NamedTuple):
    name: str
    status: os.stat_result | None


def _info(name: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, found.st_size, found.st_mtime)


def _holds_names(folder: str) -> bool:
    """Whether a name may lie there: others' folders may be deeper than can be walked through."""
    return is_name(f"{folder}x")


def _is_abandoned(temporary: str, older_than_s: float) -> bool:
    """Whether its writer is dead; one of another machine counts as dead after so long."""
    writer = _TMP_OF.match(os.path.basename(temporary))
    if writer and not writers.may_live(writer[1]):
        return True
    return time.time() - os.lstat(temporary).st_mtime > older_than_s


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def _check_deadline(deadline: float | None, what: str) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise TimedOut(f"no time left for {what}")


@contextlib.contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Turn what the operating system says into the errors every store speaks."""
    try:
        yield
    except OSError as error:
        reason = f"{what}: {error.strerror}"
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise StoreFull(f"{reason}: free some room or lower the budget") from error
            case errno.EACCES | errno.EPERM | errno.EROFS:
                raise AccessDenied(f"{reason}: give the right to write and read") from error
            case errno.ENOENT | errno.ENOTDIR:
                raise NoSuchBucket(f"{reason}: create the folder or correct the url") from error
            case errno.EISDIR | errno.ELOOP | errno.ENAMETOOLONG:
                raise InvalidName(f"{reason}: the place is taken by something else") from error
            case _:
                raise Unavailable(reason) from error
