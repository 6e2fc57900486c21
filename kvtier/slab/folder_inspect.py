"""What a folder of slabs holds, seen from outside: all namespaces, whoever serves them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvtier.errors import (
    FormatError,
    KVTierError,
    MediumError,
    MediumInUse,
    NewerFormat,
    describe_error,
    naming,
)
from kvtier.eviction.retention import BLOCKS_MAX, PINNED
from kvtier.inspect import Cleared, Depth, Filling, Garbage, Part
from kvtier.inspect.contents import (
    NAMESPACE_ID,
    Block,
    Contents,
    Hold,
    InspectorContext,
    Locked,
    locked_files,
    read_file,
    read_namespace,
    size_below,
    standing,
)
from kvtier.inspect.filling import Source, TierOpener
from kvtier.inspect.inspector import BENCH_MARK, Inspector, Prover, left_behind
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, TierSettings, WritePolicy
from kvtier.slab import retention_list
from kvtier.slab.files import (
    DATA_SUFFIX,
    LOCK,
    TABLE_SUFFIX,
    folder_locked,
    halves,
    homes,
    is_empty,
    is_newer,
    length,
    let_go,
    list_files,
    marks,
    pins_path,
    remove_bare_home,
    remove_slab,
    slab_files,
    unfinished,
    used_at,
    used_bytes,
)
from kvtier.slab.folder import SlabFolder, slab_bytes
from kvtier.slab.folder_tier import FolderTier
from kvtier.slab.inspect import Slab, SlabBlock, SlabProver, SlabSource, trouble
from kvtier.slab.layout import BAD, OWNER, OWNER_AT, TABLE_AT, SlabHeader, committed, keys_of
from kvtier.slab.shares import retaining
from kvtier.system.disk import Disk, is_locked, lock_within
from kvtier.types import NAMESPACE_BYTES_MAX, BlockKey, Namespace

S = TypeVar("S", bound=TierSettings)

_LOOK_S = 0.2
_STOPPED_S = 10.0
"""A command that was stopped so long ago (by Ctrl-Z, say) is not about to go on."""


def has_live_owner(home: Path) -> bool:
    """Whether a process acts for any owner of this namespace's folder."""
    return any(is_locked(path) for path in marks(home))


def has_owner_now(table: Path) -> bool:
    """Whether a process acts for a slab's owner. Asked under the folder's lock: an engine that came
    since the slab was looked at may have taken it over."""
    try:
        with table.open("rb", buffering=0) as file:
            (owner,) = OWNER.unpack(os.pread(file.fileno(), OWNER.size, OWNER_AT))
    except FileNotFoundError:
        return False
    except struct.error:  # too short to have one
        return has_live_owner(table.parent)
    return is_locked(table.parent / "owners" / f"{owner:08x}")


@contextlib.contextmanager
def slab_held(table: Path) -> Iterator[None]:
    """Keep engines from taking a slab over; raises MediumInUse if one has it."""
    with folder_locked(table.parent.parent):
        if has_owner_now(table):
            raise MediumInUse(f"{table} is in use: stop its engine first")
        yield


def remove_broken_slab(table: Path) -> None:
    """Remove a slab of which nobody knows the owner, if it is still broken; raises MediumInUse if
    anybody may be it."""
    home = table.parent
    with folder_locked(home.parent):
        if has_live_owner(home):
            raise MediumInUse(f"{table} is broken, and {home} is in use: stop its engines first")
        try:
            _read_table(table)
        except (NewerFormat, OSError):
            return
        except FormatError:
            remove_slab(Disk(), table)


def _wait_for(fd: int, folder: Path) -> None:
    """Lock a folder as soon as the command has ended that fills it, however long that takes; raises
    MediumInUse if that command is stopped, because it would be for ever."""
    since: float | None = None
    while not lock_within(fd, fcntl.LOCK_EX, 0.0):
        stopped = _stopped_holder(fd)
        since = None if stopped is None else since or time.monotonic()
        if since is not None and time.monotonic() - since >= _STOPPED_S:
            raise MediumInUse(
                f"{folder} is being filled by process {stopped}, which is stopped: let it go on "
                f"(kill -CONT {stopped}), or end it"
            )
        time.sleep(_LOOK_S)


def _stopped_holder(fd: int) -> int | None:
    """The process that has locked this file, if the system tells and the process is stopped."""
    inode = os.fstat(fd).st_ino
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE 4711 fe:00:2531371 0 EOF
            _, kind, _, how, pid, place, *_ = line.split()
            if (kind, how) == ("FLOCK", "WRITE") and place.endswith(f":{inode}"):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
                return int(pid) if state in "Tt" else None
    return None


@contextlib.contextmanager
def sparing(root: Path, namespace: Namespace) -> Iterator[None]:
    """Meanwhile a namespace that was copied into a folder gives no room to the one that is
    copied next: only those that no process acts for do. Its slabs that are still empty go."""
    folder = SlabFolder(root, namespace, Disk())
    owner, fd = folder.claim()
    try:
        with folder.locked():
            for slab_id in folder.slab_ids():
                table = folder.table_path(slab_id)
                if is_empty(table) and not is_newer(table) and not has_owner_now(table):
                    folder.remove_slab(slab_id)
        yield
    finally:
        let_go(folder.owners, owner, fd)


def _read_pins(home: Path) -> dict[BlockKey, float]:
    try:
        return retention_list.read_pins(pins_path(home), bytes.fromhex(home.name))
    except FormatError as error:
        path = pins_path(home)
        raise MediumError(f"{path} does not say what is pinned ({error}): remove it") from None


def _write_pins(home: Path, pinned: Mapping[BlockKey, float]) -> None:
    path = pins_path(home)
    with naming(path):
        retention_list.write(Disk(), path, {PINNED: pinned}, bytes.fromhex(home.name))


def find_garbage(
    root: Path,
    slabs: Sequence[Slab],
    over: int,
    idle_s: float | None,
    troubled: Callable[[], AbstractContextManager[None]],
) -> Iterator[Garbage]:
    """What goes of a folder whose slabs take so many bytes more than they may. What cannot be
    looked at is `troubled`, and hides nothing else."""
    going: set[Path] = set()
    for each in _but_slabs(root, idle_s, troubled):
        yield each
        path = Path(each.where)
        going.add(path)
        if root in path.parents:
            over -= each.bytes
    yield from _over_budget(root, slabs, over, going)


def _but_slabs(
    root: Path, idle_s: float | None, troubled: Callable[[], AbstractContextManager[None]]
) -> Iterator[Garbage]:
    yield from left_behind(root)
    rights = os.R_OK | os.W_OK | os.X_OK
    ours: list[Path] = []
    for home in sorted(homes(root)):
        with troubled():
            if os.access(home, rights):
                ours.append(home)
            elif os.access(home, rights & ~os.W_OK) and any(_left_by_the_dead(root, home)):
                raise PermissionError(errno.EACCES, "no right to remove anything here", str(home))
    for home in ours:
        with troubled():
            yield from _left_by_the_dead(root, home)
    for home in ours:
        with troubled():
            if _idle_for(home, idle_s):
                yield Garbage(
                    "namespace that nobody used for so long",
                    str(home),
                    size_below(home),
                    partial(_remove_idle_home, root, home, idle_s),
                )


def _left_by_the_dead(root: Path, home: Path) -> Iterator[Garbage]:
    for path in sorted(marks(home)):
        if not is_locked(path):
            yield _file(root, path, "mark of a dead owner", partial(_is_free, path))
    for path, maker in sorted(unfinished(home)):
        if not is_locked(maker):
            what = "file that a dead process was making"
            yield _file(root, path, what, partial(_is_free, maker))
    for path in sorted(halves(home)):
        if path.suffix == DATA_SUFFIX:
            what, other = "slab without a table", path.with_suffix(TABLE_SUFFIX)
        else:
            what, other = "table without a slab", path.with_suffix(DATA_SUFFIX)
        yield _file(root, path, what, partial(_is_missing, other))


def _is_free(path: Path) -> bool:
    return not is_locked(path)


def _is_missing(path: Path) -> bool:
    return not path.exists()


def _file(root: Path, path: Path, what: str, still: Callable[[], bool]) -> Garbage:
    """A file that goes, under the folder's lock, if it is still garbage then."""

    def remove_file() -> bool:
        with folder_locked(root):
            if not still():
                return False
            path.unlink(missing_ok=True)
            return True

    return Garbage(what, str(path), length(path), remove_file)


def _idle_for(home: Path, idle_s: float | None) -> bool:
    if idle_s is None:
        return False
    try:
        if has_live_owner(home):
            return False
        times = [path.stat().st_mtime for path in slab_files(home, TABLE_SUFFIX)]
        return time.time() - max(times, default=home.stat().st_mtime) > idle_s
    except FileNotFoundError:  # as is who removes it just now
        return False


def _remove_idle_home(root: Path, home: Path, idle_s: float | None) -> bool:
    used = home.exists() and not _idle_for(home, idle_s)
    try:
        return not used and remove_home(root, home)
    except FileNotFoundError:  # not even the folder is there
        return True


def remove_home(root: Path, home: Path) -> bool:
    """Remove a namespace's folder and what kvtier made in it, if it is still there; False if
    somebody uses it. Slabs of a newer version stay."""
    with folder_locked(root):
        if has_live_owner(home):
            return False
        kept = {path.stem for path in slab_files(home, TABLE_SUFFIX) if is_newer(path)}
        made = [path for path, _ in unfinished(home)]
        tables, data = slab_files(home, TABLE_SUFFIX), slab_files(home, DATA_SUFFIX)
        for path in (*tables, *data, *made):  # tables first: without one a slab is nothing
            if path.stem not in kept:
                path.unlink(missing_ok=True)
        if not kept:
            remove_bare_home(home)
    return True


def _over_budget(
    root: Path, slabs: Sequence[Slab], over: int, going: set[Path]
) -> Iterator[Garbage]:
    """The slabs of nobody that were written longest ago, until the rest is within the budget; what
    is retained goes last."""
    free = [slab for slab in slabs if not slab.in_use and slab.table.parent not in going]
    kept: set[Path] = set()
    for home in {slab.table.parent for slab in free} if over > 0 else ():
        kept |= retaining(home, [slab.table for slab in free if slab.table.parent == home])
    for slab in sorted(free, key=lambda slab: (slab.table in kept, used_at(slab.table))):
        if over <= 0:
            return
        over -= slab.size
        what = "slab beyond the capacity, written longest ago"
        yield Garbage(what, str(slab.data), slab.size, partial(_remove_slab, root, slab))


def _remove_slab(root: Path, slab: Slab) -> bool:
    with folder_locked(root):
        if has_owner_now(slab.table):
            return False
        remove_slab(Disk(), slab.table)
        return True


class FolderFilling(Filling[S]):
    """Fills slabs of its own, which the next engine adopts."""

    def __init__(self, *args: Any, root: Path) -> None:
        super().__init__(*args)
        self.root = root

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Of two commands at once each would store, in slabs of its own, what the other has on its
        way."""
        folder = self.root
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # opening the tier says what is wrong
                folder.mkdir(mode=0o700, exist_ok=True)
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, fd)
                if not lock_within(fd, fcntl.LOCK_EX, 0.0):
                    said = f"another command is filling {folder}: waiting until it has ended"
                    self.reporter.warn(said)
                    _wait_for(fd, folder)
            yield

    def opened_settings(self) -> S:
        """In a folder that the stack only reads, how much others keep is up to them."""
        taking = super().opened_settings()
        if self.settings.write is not WritePolicy.NEVER:
            return taking
        room = max(self.capacity, used_bytes(self.root))
        return msgspec.structs.replace(taking, capacity=Capacity(ByteSize(room)))

    def heed_retained(self, tier: Tier, namespace: Namespace) -> None:
        """What any engine of the namespace does: the copy evicts from the slabs of all that are
        gone."""
        if isinstance(tier, FolderTier) and self.keeps():
            tier.retain_as_others()

    def block_bytes(self, namespace: Namespace) -> list[int]:
        return [record_bytes(namespace.payload_bytes)]  # a whole slot

    def taken(self, blocks: int, room: int, block_bytes: Sequence[int]) -> int:
        """Whole slabs, because each slab holds blocks of one namespace."""
        (slot_bytes,) = block_bytes
        slots = max(1, slab_bytes(self.capacity) // slot_bytes)
        return -(-blocks // slots) * slots * slot_bytes

    def protect(
        self, namespace: Namespace, keys: Callable[[], Set[BlockKey]]
    ) -> AbstractContextManager[None]:
        return sparing(self.root, namespace)


class FolderInspector(Inspector[S]):
    """Looks at a folder: below it a folder a namespace, in which slabs are pairs of files."""

    own_files: tuple[str, ...] = (LOCK,)
    """What else may lie in the root."""

    def __init__(self, opener: TierOpener, settings: S, context: InspectorContext) -> None:
        super().__init__(opener, settings, context)
        self.slabs: list[Slab] = []
        self.broken: list[Path] = []
        """Tables of this version that are not as they must be."""

    @property
    @abstractmethod
    def root(self) -> Path:
        """The folder."""

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        root, found, disk = self.root, self.contents, Disk()
        self.slabs, self.broken = [], []
        found.capacity = self.settings.capacity.resolve(disk.total_bytes(standing(root)))
        found.free = disk.free_bytes(standing(root))
        if not root.is_dir():
            found.unseen = False
            return
        locked = locked_files()
        try:
            names = sorted(path.name for path in root.iterdir())
        except OSError as error:
            found.troubles.append(trouble(root, error))
            return
        found.used = used_bytes(root)
        for name in names:
            home = root / name
            if NAMESPACE_ID.fullmatch(name) and home.is_dir() and not home.is_symlink():
                self._look_at_home(home, locked)
            elif name not in self.own_files and not name.startswith(BENCH_MARK):
                found.strangers.append(name)
        self.count(found)
        found.unseen = False

    def _look_at_home(self, home: Path, locked: Locked) -> None:
        found = self.contents
        try:
            text = read_file(home / "namespace.json", NAMESPACE_BYTES_MAX)
            namespace = read_namespace(text, home.name)
            names = sorted(path.name for path in home.iterdir())
        except OSError as error:
            if home.exists():  # else it was removed since it was listed
                found.troubles.append(trouble(home, error))
            return
        if namespace is not None:
            found.namespaces[home.name] = namespace
        before = len(self.slabs)
        for name in names:
            table = home / name
            if table.suffix != TABLE_SUFFIX or not _is_slab_id(table.stem):
                continue
            try:
                self.slabs.append(self._slab(table, locked))
            except FileNotFoundError:
                continue  # removed since it was listed
            except (FormatError, OSError) as error:
                found.troubles.append(trouble(table, error))
                if isinstance(error, FormatError) and not isinstance(error, NewerFormat):
                    self.broken.append(table)
        if namespace is None:
            rest = f"kvtier clear {home.name[:12]} --tier {self.tier} removes its blocks here"
            if len(self.slabs) == before:  # `clear` knows only what has blocks, or is described
                rest = f"{home} can be removed"
            found.troubles.append(
                f"{home / 'namespace.json'} does not describe this namespace: the next engine that "
                f"serves it writes it anew, and {rest}"
            )

    def _slab(self, table: Path, locked: Locked) -> Slab:
        header, owner = _read_table(table)
        mark = table.parent / "owners" / owner
        in_use = locked.has(mark)
        return Slab(
            table=table,
            data=table.with_suffix(DATA_SUFFIX),
            header=header,
            in_use=in_use,
            owner=owner,
            engine=self.engine_of(mark) if in_use else "",
        )

    def engine_of(self, mark: Path) -> str:
        """The name of a living engine, if its mark tells."""
        return ""

    def holds(self, namespace: str) -> dict[BlockKey, list[Hold]]:
        found: dict[BlockKey, list[Hold]] = {}
        now = time.time()
        home = self.root / namespace
        for path in (*list_files(home), pins_path(home)):
            try:
                sessions = retention_list.read(path, bytes.fromhex(namespace))
            except (FormatError, OSError) as error:
                said = f"{path} does not say what is retained: {describe_error(error)}"
                if said not in self.contents.troubles:
                    self.contents.troubles.append(said)
                continue
            for session, blocks in sessions.items():
                for key, until in blocks.items():
                    if until > now:
                        found.setdefault(key, []).append(Hold(session, until))
        return found

    def slot_maps(self) -> Sequence[Slab]:
        return self.slabs

    def count(self, found: Contents) -> None:
        """Sum the slabs by namespace; one whose table its disk does not give is a trouble, and no
        slab."""
        parts: dict[str, Part] = {}
        holds = {name: self.holds(name) for name in {slab.namespace for slab in self.slabs}}
        slabs, self.slabs = self.slabs, []
        for slab in slabs:
            try:
                entries = slab.entries()
            except OSError as error:
                found.troubles.append(describe_error(error))
                continue
            self.slabs.append(slab)
            part = parts.setdefault(
                slab.namespace, Part(tier=self.tier, kind=self.kind, namespace=slab.namespace)
            )
            valid = committed(entries)
            part.blocks += len(valid)
            part.bytes += len(valid) * slab.header.slot_bytes
            if held := holds[slab.namespace]:
                part.retained += sum(key in held for key in keys_of(entries[valid]))
            part.quarantined += int((entries["state"] == BAD).sum())
            part.in_use = part.in_use or slab.in_use
            if len(valid):
                times = entries["stored_at"][valid]
                part.add_times(float(times.min()), float(times.max()))
                part.add_uses(
                    int(entries["uses"][valid].sum(dtype=np.uint64)),
                    float(entries["used_at"][valid].max()),
                )
        found.parts = sorted(parts.values(), key=lambda part: -part.bytes)

    def blocks(self, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[SlabBlock]:
        for slab in self.slabs:
            if slab.namespace.startswith(namespace):
                yield from self._blocks_of(slab)

    def _blocks_of(self, slab: Slab) -> Iterator[SlabBlock]:
        entries, namespace = slab.entries(), slab.namespace
        states = entries["state"]
        rows = [*committed(entries).tolist(), *(states == BAD).nonzero()[0].tolist()]
        chosen = entries[rows]
        columns = [chosen[name].tolist() for name in ("stored_at", "uses", "used_at")]
        for slot, key, at, uses, last in zip(rows, keys_of(chosen), *columns, strict=True):
            yield SlabBlock(
                tier=self.tier,
                kind=self.kind,
                namespace=namespace,
                key=key,
                bytes=slab.header.slot_bytes,
                stored_at=float(at),
                hits=uses,
                used=float(last) or None,
                quarantined=bool(states[slot] == BAD),
                engine=slab.engine,
                slab=slab,
                slot=slot,
            )

    def prover(self, namespaces: Mapping[str, Namespace]) -> Prover:
        return SlabProver()

    def sources(self, namespace: str) -> list[Source]:
        return [
            SlabSource(self.tier, self.kind, slab)
            for slab in self.slabs
            if slab.namespace == namespace
        ]

    def pin(self, namespace: str, keys: Sequence[BlockKey], until: float, most: int) -> int:
        home = self.root / namespace
        if not home.is_dir():
            raise MediumError(
                f"{self.root} has nothing of this namespace: an engine has to be there first"
            )
        with folder_locked(self.root):
            pinned = _read_pins(home)
            room = min(most, BLOCKS_MAX)
            for key in keys:
                if key in pinned or len(pinned) < room:
                    pinned[key] = max(until, pinned.get(key, until))
            _write_pins(home, pinned)
        return sum(key in pinned for key in keys)

    def unpin(self, namespace: str, keys: Sequence[BlockKey] | None) -> int:
        home = self.root / namespace
        if not home.is_dir():
            return 0
        with folder_locked(self.root):
            pinned = _read_pins(home)
            gone = [key for key in (list(pinned) if keys is None else keys) if key in pinned]
            for key in gone:
                del pinned[key]
            _write_pins(home, pinned)
        return len(gone)

    # -- repair

    def home_of(self, block: Block) -> str:
        assert isinstance(block, SlabBlock)
        return str(block.slab.table)

    def quarantine(self, blocks: Sequence[Block]) -> int:
        slots = [block for block in blocks if isinstance(block, SlabBlock)]
        slab = slots[0].slab
        with slab_held(slab.table):
            return slab.mark_bad(slots)

    def remove_broken(self, namespace: str) -> list[str]:
        left = []
        for table in self.broken:
            if not table.parent.name.startswith(namespace):
                continue
            self.forget_troubles(f"{table}: ")
            try:
                remove_broken_slab(table)
            except FileNotFoundError:  # somebody else has just removed it
                continue
            except (KVTierError, OSError) as error:
                left.append(describe_error(error))
        return left

    # -- what goes

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        if not self.root.is_dir():
            return
        over = 0
        if self.settings.write is not WritePolicy.NEVER:  # what others may keep there is theirs
            over = self.contents.used - (self.contents.capacity or 0)
        with self.noting_troubles():
            yield from find_garbage(self.root, self.slabs, over, idle_s, self.noting_troubles)

    def clear(self, part: Part) -> Iterator[Cleared]:
        yield self.try_to_clear(part, partial(self._remove_home, self.root / part.namespace))

    def _remove_home(self, home: Path) -> None:
        if not remove_home(self.root, home):
            raise MediumInUse(f"{home} is in use: stop its engines first")
        if not home.exists():
            self.forget_troubles(f"{home}/")

    def filling(self) -> FolderFilling[S]:
        given = self.opener, self.settings, self.context, self.capacity()
        return FolderFilling(*given, root=self.root)


def _is_slab_id(text: str) -> bool:
    return len(text) == 8 and not set(text) - set("0123456789abcdef")


def _read_table(table: Path) -> tuple[SlabHeader, str]:
    """The header of a slab that is as it must be, and its owner; raises FormatError or OSError."""
    page = read_file(table, TABLE_AT)
    header = SlabHeader.unpack(page)
    if header.namespace.hex() != table.parent.name or f"{header.slab_id:08x}" != table.stem:
        raise FormatError("it belongs to another slab or namespace")
    data = table.with_suffix(DATA_SUFFIX)
    if table.stat().st_size < header.table_bytes:
        raise FormatError("it is cut short")
    if data.stat().st_size < header.data_end:
        raise FormatError(f"{data.name} is cut short")
    (owner,) = OWNER.unpack_from(page, OWNER_AT)
    return header, f"{owner:08x}"
