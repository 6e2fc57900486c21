"""`kvtier bench`: how fast the tiers of a stack are here and now, measured beside it, never in it.

Every tier is measured as part of a stack of its own: host memory under a name that no engine has,
and below it that one tier, with a synthetic namespace, in a place that its inspector makes. Neither
the budget nor the blocks of a live engine are touched.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.chain.ledger import Ticket
from kvtier.cli import console, options
from kvtier.cli.inspect import inspector_of
from kvtier.cli.signals import uninterrupted
from kvtier.config import StackConfig, load
from kvtier.errors import KVTierError, MediumError, Unsupported
from kvtier.inspect.filling import SETTLE_S
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.settings import WritePolicy
from kvtier.slab.layout import ENTRY_BYTES
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, block_key

app = options.new_app()

_SLACK_BYTES = 1 << 20
_PIECE_BYTES = 32 << 20
_SINGLES = 32
Announce = Callable[[str], None]


@app.command(
    epilog="Examples: kvtier bench --config stack.yaml; "
    "kvtier bench -c stack.yaml --chunk 4MiB --blocks 64"
)
def bench(
    config: options.ConfigOption,
    chunk: Annotated[
        int,
        typer.Option(
            parser=options.parse_block,
            metavar="SIZE",
            help="Payload of one block.",
            show_default="1MiB",
        ),
    ] = 1 << 20,
    blocks: Annotated[int, typer.Option(min=1, max=65536, help="Blocks in each round.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds, of which medians are shown.")
    ] = 3,
    json: options.JsonOption = False,
) -> None:
    """Store, load and check synthetic blocks in every tier.

    It does not touch the stack's data or an engine that runs on it: its blocks go to memory and
    folders of their own, which are removed afterwards. A store is timed from the call until the
    last block is in that tier, a load until it is in host memory and proved. Exit code 1 if a block
    did not come back, or came with other bytes.
    """
    stack = load(config, record_bytes=record_bytes(chunk))
    found = measure(stack, Size(chunk, blocks, rounds), console.note)
    good = all(tier.good for tier in found)
    if json:
        tiers = [msgspec.to_builtins(tier) | {"good": tier.good} for tier in found]
        console.print_json({"ok": good, "chunk_bytes": chunk, "rounds": rounds, "tiers": tiers})
    else:
        _show(found, chunk, blocks, rounds)
    if not good:
        raise typer.Exit(console.EXIT_FAILURE)


def _show(found: list[Measured], chunk: int, blocks: int, rounds: int) -> None:
    console.say(f"rounds: {rounds}, of {blocks} blocks of {amounts.size(chunk)}; medians")
    columns = ["tier", "store", "load", "one block", "worst", "hits"]
    rows = [
        [
            tier.tier,
            amounts.rate(tier.store_bytes_per_s) if tier.hits else "-",
            amounts.rate(tier.load_bytes_per_s) if tier.hits else "-",
            amounts.duration(tier.block_s) if tier.hits else "-",
            amounts.duration(tier.block_worst_s) if tier.hits else "-",
            f"{tier.hits}/{tier.blocks}",
        ]
        for tier in found
    ]
    console.print_table(columns, rows, numbers=columns[1:])
    for tier in found:  # below the table: a store's own words are too long for a column
        if note := f"{tier.wrong} blocks came back WRONG" if tier.wrong else tier.note:
            console.say_wrapped(f"{tier.tier}: {note}", 2)


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


def measure(
    config: StackConfig, size: Size, announce: Announce, without: Collection[int] = ()
) -> list[Measured]:
    """Every tier of a stack but those of some numbers, one after the other; `announce` hears which
    is next."""
    found: list[Measured] = []
    for index, settings in enumerate(config.tiers):
        result = Measured(tier=settings.kind, place=inspector_of(config, index).where())
        if index in without:
            result.note = "not asked for"
        elif index and settings.write is WritePolicy.NEVER:
            result.note = "only read"
        else:
            announce(settings.kind)
            try:
                with _bench_stack(config, size, index) as stack:
                    (_measure_lower if index else _measure_host)(stack, size, result)
            except Unsupported:
                result.note = "nothing can be measured beside what it holds"
            except MediumDown as error:  # what was measured until then says nothing
                result = Measured(tier=result.tier, place=result.place, blocks=size.blocks)
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
        stack.settle(SETTLE_S)
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
        stack.delete(blocks.keys)
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
        stack.settle(SETTLE_S)
        for tier in stack.chain.tiers:
            tier.refresh()
    stack.delete(keys)
    stack.chain.tiers[1].refresh()


def _load(stack: Stack, keys: Sequence[BlockKey]) -> Ticket:
    ticket = stack.chain.begin_load(keys, "bench", time.monotonic() + SETTLE_S)
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
    held, interrupted = ExitStack(), False  # it ends then, whatever cannot be removed
    try:
        with uninterrupted():
            inspectors = [inspector_of(config, tier) for tier in sorted({0, index})]
            places = [each.measuring_place(room) for each in inspectors]
            tiers = tuple(held.enter_context(place) for place in places)
        measured = msgspec.structs.replace(config, tiers=tiers)
        with _opened(measured, namespace) as stack:
            yield stack
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        with uninterrupted(), suppress(MediumDown) if interrupted else nullcontext():
            try:
                held.close()
            except MediumError as error:
                raise MediumDown(str(error)) from error


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
