"""How fast the tiers of a stack are here and now, measured beside it and never in it.

Every tier is measured as part of a stack of its own: host memory under a name that no engine has,
and below it that one tier, with a synthetic namespace. A tier that keeps its blocks in a folder
gets an empty one beside it: neither the budget nor the blocks of a live engine are touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvtier.backends.cpu.memory_limits import in_memory, memory_left
from kvtier.cli.hold import holding
from kvtier.cli.holdings import BENCH_MARK, standing, where_of
from kvtier.cli.interrupts import uninterrupted
from kvtier.cli.look_objects import empty_store, local_folder
from kvtier.cli.trials import new_bench
from kvtier.config import StackConfig
from kvtier.core.chain.in_flight import Ticket
from kvtier.core.records.record import HEADER_BYTES, record_bytes
from kvtier.core.settings import (
    Admission,
    ByteSize,
    Capacity,
    Duration,
    Persistence,
    TierSettings,
    WritePolicy,
)
from kvtier.core.slab.layout import ENTRY_BYTES
from kvtier.core.system.disk import Disk
from kvtier.errors import KVTierError, MediumError
from kvtier.observe import human
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, block_key

_SLACK_BYTES = 1 << 20
_PIECE_BYTES = 32 << 20
_SINGLES = 32
_SETTLE_S = 120.0
_FOR_EVER = Duration(50 * 365 * 86400.0)


_TAKE_ALL: dict[str, Any] = {
    "write": WritePolicy.THROUGH,
    "admission": Admission.ALWAYS,
    "load_deadline": Duration(_SETTLE_S),
    "store_deadline": Duration(_SETTLE_S),
    "queue_blocks": 1 << 20,
}


class MediumDown(KVTierError):
    """A store went away, or was never there: the other tiers can be measured even so."""


class Size(msgspec.Struct, frozen=True):
    """How much is stored and loaded, and how often."""

    chunk_bytes: int
    blocks: int
    rounds: int


class Measured(msgspec.Struct, kw_only=True):
    """One tier's figures; medians of the rounds. Rates are 0 where nothing could be moved."""

    tier: str
    place: str = ""
    blocks: int = 0
    hits: int = 0
    wrong: int = 0
    """Blocks whose bytes were not those that were stored: there must be none, ever."""
    store_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    block_s: float = 0.0
    """Seconds until one block, asked for alone, is in host memory."""
    block_worst_s: float = 0.0
    note: str = ""

    @property
    def good(self) -> bool:
        """Whether everything that was stored came back right."""
        return self.hits == self.blocks and not self.wrong


Tell = Callable[[str], None]


def measure(
    config: StackConfig, size: Size, tell: Tell, without: Collection[int] = ()
) -> list[Measured]:
    """Every tier of a stack but those of some numbers, one after the other; `tell` hears which one
    is next."""
    found: list[Measured] = []
    for index, settings in enumerate(config.tiers):
        result = Measured(tier=settings.kind, place=where_of(settings))
        if index in without:
            result.note = "not asked for"
        elif index and settings.write is WritePolicy.NEVER:
            result.note = "only read"
        elif index and not _has_room_beside(settings):
            result.note = "nothing can be measured beside what it holds"
        else:
            tell(settings.kind)
            try:
                with _bench_stack(config, size, index) as stack:
                    (_measure_lower if index else _measure_host)(stack, size, result)
            except MediumDown as error:  # what was measured until then says nothing
                result = Measured(tier=settings.kind, place=where_of(settings), blocks=size.blocks)
                result.note = str(error)
        found.append(result)
    return found


class Blocks:
    """Keys and payloads of one round: distinct, and without room of their own."""

    def __init__(self, size: Size) -> None:
        source = memoryview(os.urandom(size.chunk_bytes + 8 * size.blocks))
        mark = secrets.token_bytes(8)
        self.payloads: dict[BlockKey, memoryview] = {
            block_key(mark + index.to_bytes(8, "big")): source[8 * index :][: size.chunk_bytes]
            for index in range(size.blocks)
        }
        self.keys = list(self.payloads)


def _measure_host(stack: Stack, size: Size, result: Measured) -> None:
    stores, loads, singles = [], [], []
    target = bytearray(size.chunk_bytes)
    for number in range(size.rounds + 1):
        blocks = Blocks(size)
        start = time.perf_counter()
        stack.store(blocks.payloads)
        stored = time.perf_counter() - start
        start = time.perf_counter()
        ticket = stack.chain.begin_load(blocks.keys, "bench", float("inf"))
        for record in stack.host.views(ticket.spec):
            target[:] = record[HEADER_BYTES : HEADER_BYTES + size.chunk_bytes]
        loaded = time.perf_counter() - start
        _count(result, stack, ticket, blocks)
        for key in blocks.keys[:_SINGLES]:
            start = time.perf_counter()
            single = stack.chain.begin_load([key], "bench", float("inf"))
            target[:] = stack.host.views(single.spec)[0][HEADER_BYTES:][: size.chunk_bytes]
            singles.append(time.perf_counter() - start)
            stack.chain.end_load(single)
        stack.chain.forget(blocks.keys)
        if number:  # the first round warms up
            stores.append(stored)
            loads.append(loaded)
    _conclude(result, size, stores, loads, singles)


def _measure_lower(stack: Stack, size: Size, result: Measured) -> None:
    host, lower = stack.chain.tiers
    _warm_up(stack, size)
    stores, loads, singles = [], [], []
    for _ in range(size.rounds):
        blocks = Blocks(size)
        start = time.perf_counter()
        stack.store(blocks.payloads)
        stack.settle(_SETTLE_S)
        stores.append(time.perf_counter() - start)
        host.forget(blocks.keys)
        start = time.perf_counter()
        ticket = _load(stack, blocks.keys)
        loads.append(time.perf_counter() - start)
        _count(result, stack, ticket, blocks)
        for key in blocks.keys[:_SINGLES]:
            host.forget([key])
            start = time.perf_counter()
            single = _load(stack, [key])
            singles.append(time.perf_counter() - start)
            stack.chain.end_load(single)
        stack.chain.forget(blocks.keys)
        lower.flush()
        lower.refresh()
    drops = [link.drops for link in stack.chain.chain_stats().links if link.drops]
    if not result.good:
        result.note = f"not stored: {drops[0]}" if drops else "not all came back"
    _conclude(result, size, stores, loads, singles)


def _warm_up(stack: Stack, size: Size) -> None:
    """Write the tier's whole room once, in pieces, so that no round waits for it to be made."""
    piece = max(1, min(size.blocks, _PIECE_BYTES // size.chunk_bytes))
    keys = []
    for _ in range(-(-size.blocks // piece)):
        blocks = Blocks(Size(size.chunk_bytes, piece, 1))
        keys += stack.store(blocks.payloads)
        stack.settle(_SETTLE_S)
        for tier in stack.chain.tiers:
            tier.refresh()
    stack.chain.forget(keys)
    stack.chain.tiers[1].flush()
    stack.chain.tiers[1].refresh()


def _load(stack: Stack, keys: Sequence[BlockKey]) -> Ticket:
    ticket = stack.chain.begin_load(keys, "bench", time.monotonic() + _SETTLE_S)
    while not ticket.landed:
        stack.mover.wait(0.05)
        stack.chain.poll()
    return ticket


def _count(result: Measured, stack: Stack, ticket: Ticket, blocks: Blocks) -> None:
    """Compare all that was loaded with what was stored, and let it go."""
    result.blocks += len(blocks.keys)
    for key, record in zip(ticket.keys, stack.host.views(ticket.spec), strict=True):
        if key in ticket.failed:
            continue
        payload = blocks.payloads[key]
        right = record[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload
        result.hits += right
        result.wrong += not right
    stack.chain.end_load(ticket)


def _conclude(
    result: Measured,
    size: Size,
    stores: Sequence[float],
    loads: Sequence[float],
    singles: Sequence[float],
) -> None:
    moved = size.chunk_bytes * size.blocks
    if result.hits:
        result.store_bytes_per_s = moved / statistics.median(stores)
        result.load_bytes_per_s = moved / statistics.median(loads)
        result.block_s = statistics.median(singles)
        result.block_worst_s = max(singles)


# -- a stack beside the stack ----------------------------------------------------------------


@contextmanager
def _bench_stack(config: StackConfig, size: Size, index: int) -> Iterator[Stack]:
    """Host memory, and below it tier `index` if that is another; gone without trace afterwards."""
    namespace = Namespace(facts={"bench": secrets.token_hex(8)}, group_bytes=(size.chunk_bytes,))
    room = (record_bytes(size.chunk_bytes) + ENTRY_BYTES) * size.blocks * 2 + _SLACK_BYTES
    host = folder_of(config.tiers[0])
    if host is not None:
        _refuse_without_room(standing(host), room)
    tiers = [_private(config.tiers[0], room)]
    # `lower` is a place of our own or nothing, never the tier's own settings: all in it goes.
    folder, lower = None, None
    held, told = ExitStack(), False  # who is told to end does so, whatever cannot be removed
    try:
        if index:
            with uninterrupted():
                folder = _folder_beside(config.tiers[index], room)
                if folder is not None:  # for as long as it is held, `gc` leaves it alone
                    held.enter_context(holding(folder))
            lower = _lower(config.tiers[index], room, folder)
            tiers.append(lower)
        measured = msgspec.structs.replace(config, tiers=tuple(tiers))
        with _opened(measured, namespace) as stack:
            yield stack
    except KeyboardInterrupt:
        told = True
        raise
    finally:
        with uninterrupted(), suppress(MediumDown) if told else nullcontext():
            held.close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            elif lower is not None and hasattr(lower, "url"):
                _empty_store(lower)


@contextmanager
def _opened(config: StackConfig, namespace: Namespace) -> Iterator[Stack]:
    """A stack that is emptied before it is closed: Ctrl-C or `kill` leaves nothing half open."""
    stack: Stack | None = None
    try:
        with uninterrupted():
            stack = Stack(config, namespace, engine=f"bench-{os.getpid()}")
        yield stack
    finally:
        if stack is not None:
            with uninterrupted(), closing(stack):
                stack.chain.clear()
                for tier in stack.chain.tiers:
                    tier.flush()


def _empty_store(settings: TierSettings) -> None:
    try:
        empty_store(settings)
    except MediumError as error:
        raise MediumDown(str(error)) from error


def _private(settings: TierSettings, room: int) -> TierSettings:
    wanted: dict[str, Any] = {
        "capacity": Capacity(ByteSize(room)),
        "write": WritePolicy.THROUGH,
        "persistence": Persistence.DISCARD,
        "keep_for": _FOR_EVER,  # measuring is no occasion to tidy up after others
    }
    return _replace(settings, wanted)


def patient(settings: TierSettings) -> TierSettings:
    """A tier that takes all that it is given, and has time, but not for a store that is down."""
    return _replace(settings, _TAKE_ALL | {"unreachable": "refuse"})


def _lower(settings: TierSettings, room: int, folder: Path | None) -> TierSettings:
    wanted = dict(_TAKE_ALL)
    url = getattr(settings, "url", None)
    if folder is not None:
        wanted |= {"capacity": Capacity(ByteSize(room + room // 8))}
        path = getattr(settings, "path", None)  # another package may have a type of its own for it
        wanted |= {"url": folder.as_uri()} if path is None else {"path": type(path)(folder)}
    elif url is not None:
        # A prefix of its own: a tier may delete what is beyond its capacity from all that it sees.
        wanted["url"] = f"{url.rstrip('/')}/{new_bench()}"
    return _replace(settings, wanted)


def _replace(settings: TierSettings, wanted: dict[str, Any]) -> TierSettings:
    """Change those of the fields that this kind of tier has."""
    known = {name: value for name, value in wanted.items() if hasattr(settings, name)}
    return msgspec.structs.replace(settings, **known)


def _has_room_beside(settings: TierSettings) -> bool:
    """Whether there is a place of our own to measure a tier in: a folder, a prefix of a store, or
    memory, which every process has anew. What other packages bring may have none."""
    return settings.kind in ("memory", "object") or folder_of(settings) is not None


def folder_of(settings: TierSettings) -> Path | None:
    """Where a tier lies, if that is in a file system."""
    path = getattr(settings, "path", None)
    return Path(path) if path else local_folder(getattr(settings, "url", ""))


def _folder_beside(settings: TierSettings, room: int) -> Path | None:
    """An empty folder on the disk of a tier's own, outside of what counts against its budget."""
    home = folder_of(settings)
    if home is None:
        return None
    near = standing(home)
    beside = home.parent
    if near.stat().st_dev != beside.stat().st_dev or not os.access(beside, os.W_OK | os.X_OK):
        beside = near  # it is the root of a disk, or nothing may be written beside it
    floor = getattr(settings, "free_floor", None)
    _refuse_without_room(beside, room + room // 8, floor.bytes if floor is not None else 0)
    return Path(tempfile.mkdtemp(prefix=f"{BENCH_MARK}{os.getpid()}-", dir=beside))


def _refuse_without_room(folder: Path, wanted: int, kept: int = 0) -> None:
    """Opening the tier would refuse, too, but speak of a capacity that the user never wrote."""
    free = Disk().free_bytes(folder) - kept
    if in_memory(folder) and (left := memory_left()) is not None:  # a container may have less
        free = min(free, left)
    if free < wanted:
        raise MediumError(
            f"{folder} has too little free room to measure with {human.size(wanted)}: free some, "
            "or measure with fewer blocks (bench --blocks) or not at all (--no-measure)"
        )
