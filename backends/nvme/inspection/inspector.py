"""What an NVMe tier's folder holds, seen from outside: all namespaces, whoever serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from kvtier.backends.nvme.folder.files import (
    DATA_SUFFIX,
    TABLE_SUFFIX,
    list_files,
    pins_path,
    used_bytes,
)
from kvtier.backends.nvme.inspection.checks import check_disk
from kvtier.backends.nvme.inspection.filling import NvmeFilling
from kvtier.backends.nvme.inspection.garbage import find_garbage, remove_home
from kvtier.backends.nvme.inspection.offline_locks import remove_broken_slab, slab_held
from kvtier.backends.nvme.inspection.pins import pin, unpin
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.wear.inspection import check_writes, writes_to
from kvtier.backends.nvme.wear.write_ledger import NAME as WRITES
from kvtier.core.slab.inspection import SlabInspector, trouble
from kvtier.core.slab.layout import OWNER, OWNER_AT, TABLE_AT, SlabHeader
from kvtier.core.slab.slab_files import Slab
from kvtier.errors import FormatError, MediumInUse
from kvtier.inspect import Cleared, Depth, Finding, Garbage, Part
from kvtier.inspect.contents import (
    NAMESPACE_ID,
    Locked,
    Writes,
    locked_files,
    read_file,
    read_namespace,
    standing,
)
from kvtier.inspect.inspector import BENCH_MARK
from kvtier.settings import WritePolicy
from kvtier.system.disk import Disk
from kvtier.types import NAMESPACE_BYTES_MAX, BlockKey


class NvmeInspector(SlabInspector[NvmeSettings]):
    """Looks at a folder: below it a folder a namespace, in which slabs are pairs of files."""

    @property
    def root(self) -> Path:
        return Path(self.settings.path)

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
            elif name not in ("lock", WRITES) and not name.startswith(BENCH_MARK):
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
                self.note(table, error)
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
        return Slab(
            table=table,
            data=table.with_suffix(DATA_SUFFIX),
            header=header,
            in_use=locked.has(table.parent / "owners" / owner),
            engine=owner,
        )

    def read_slab(self, table: Path) -> SlabHeader:
        return _read_table(table)[0]

    def lists(self, namespace: str) -> list[Path]:
        home = self.root / namespace
        return [*list_files(home), pins_path(home)]

    def pin(self, namespace: str, keys: Sequence[BlockKey], until: float, most: int) -> int:
        return pin(self.root, self.root / namespace, keys, until, most)

    def unpin(self, namespace: str, keys: Sequence[BlockKey] | None) -> int:
        return unpin(self.root, self.root / namespace, keys)

    def held(self, slab: Slab) -> AbstractContextManager[None]:
        return slab_held(slab.table)

    def remove_table(self, table: Path) -> None:
        remove_broken_slab(table, lambda: self.is_broken(table))

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

    def checks(self) -> Iterator[Finding]:
        yield from check_disk(self.area(), self.settings)
        yield from check_writes(self.area(), self.settings)

    def writes(self) -> Writes | None:
        return writes_to(self.settings, self.capacity())

    def moved_to(self, folder: Path) -> dict[str, object]:
        """Without the write budget: what is measured there is the disk."""
        return super().moved_to(folder) | {"writes": None, "endurance": None}

    def kept_free(self) -> int:
        return self.settings.free_floor.bytes

    def filling(self) -> NvmeFilling:
        return NvmeFilling(self.opener, self.settings, self.context, self.capacity())


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
