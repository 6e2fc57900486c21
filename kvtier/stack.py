"""A stack: what a YAML file describes, opened.

    with Stack.open("stack.yaml", namespace) as stack:
        stack.store({key: payload})
        found = stack.load([key])

Engines use `stack.chain`, which never blocks. The methods here are for everybody else: they wait
until the bytes have moved (docs/reference/library.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import msgspec

from kvtier.amounts import size
from kvtier.chain.context import ChainContext
from kvtier.chain.isolated_tier import IsolatedTier
from kvtier.chain.ledger import Ticket
from kvtier.chain.stats import ChainStats
from kvtier.chain.tier_chain import TierChain
from kvtier.config import Misses, MoverMode, Source, StackConfig, check, check_engine, load
from kvtier.config.loader import rate_owner, rates_folder
from kvtier.cost.model import CostModel
from kvtier.cost.saved_rates import RateKeeper, RatesFile
from kvtier.errors import MediumInUse, NotOpen
from kvtier.interfaces.backend import TierContext, backend, kinds
from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import Mover
from kvtier.interfaces.tier import Tier
from kvtier.move.process import ProcessMover
from kvtier.move.threads import ThreadMover
from kvtier.record.record import (
    HEADER_BYTES,
    Buffer,
    Header,
    header_of,
    record_bytes,
    seal,
    verify_payload,
)
from kvtier.system.calls import close_all
from kvtier.types import BlockKey, Namespace, Outcome, Presence, Reservation, checked_keys

logger = logging.getLogger(__name__)

_ENGINES_MAX = 64
_NAME_IN_USE = (
    "the engine name %r is in use on this machine: this engine goes on as %r. They share "
    "CPU memory all the same, but after a restart what either has retained is found by whoever has "
    "its name then. Give each engine a name of its own (name in its stack, KVTIER_NAME in those of "
    "configs/), or start it when the other has ended"
)
_WAIT_S = 0.05
_PIECE = 256
UNSETTLED_KEPT = 1 << 16


class Settled(msgspec.Struct, frozen=True):
    """What `Stack.settle` has found. It is true if all has been written and nothing was lost."""

    done: bool
    """Whether nothing was left to write, before the time was over."""
    lost: Sequence[BlockKey]
    """Of the last 65,536 blocks that were stored since `settle` was done before: those that no
    tier holds, because it could not be written, or was evicted."""

    def __bool__(self) -> bool:
        return self.done and not self.lost


class Stack:
    """Tiers, the chain over them, and the mover between them.

    Threads that call it take turns; the chain itself is for one. It belongs to the process that
    opened it: a child that is forked off opens one of its own.
    """

    def __init__(
        self,
        config: StackConfig,
        namespace: Namespace,
        *,
        serving: bool = False,
        costs: CostModel | None = None,
        engine: str | None = None,
        near: Sequence[int] = (),
        ranks: int = 1,
    ) -> None:
        self.config = config
        self.namespace = namespace
        wanted = TierContext(
            namespace, engine or config.name, tuple(near), serving, stack=config.name
        )
        self.context, tiers = _open_tiers(config, wanted)
        opened: list[Handler | Mover] = []
        try:
            host = backend(config.tiers[0].kind).open_handler(config.tiers[0], self.context)
            opened.append(host)
            assert isinstance(host, HostHandler), "the configuration puts host memory first"
            self.host = host
            self.mover = _open_mover(config, self.context, serving=serving)
            opened.insert(0, self.mover)
            self.chain = TierChain(
                ChainContext(tiers, config.tiers, self.mover, namespace, costs),
                prefetch=config.prefetch if serving else None,
                retain=config.retain if serving else None,
            )
            self.chain.misses.on = serving and config.misses is not Misses.IGNORE
            self._rates = (
                _keep_rates(config, namespace, costs, ranks) if costs and serving else None
            )
        except BaseException:
            close_all([*opened, *tiers])
            raise
        self._requests = 0
        self._unsettled = deque[BlockKey](maxlen=UNSETTLED_KEPT)
        self._process = os.getpid()
        self._closed = False
        self._turns = threading.RLock()  # a signal's handler may close what it interrupts

    @classmethod
    def open(
        cls,
        source: Source | StackConfig,
        namespace: Namespace,
        *,
        serving: bool = False,
        costs: CostModel | None = None,
        engine: str | None = None,
        near: Sequence[int] = (),
        ranks: int = 1,
    ) -> Self:
        """Read a configuration and open what it describes. `serving` picks a mover in a process
        of its own where the configuration leaves the choice; `engine` is the name under which
        private media are kept, the configuration's own if it is not given; `near` are the NUMA
        nodes that host memory should come from; `ranks` are those of the engine."""
        size = record_bytes(namespace.payload_bytes)
        if isinstance(source, StackConfig):
            check(source, record_bytes=size)
        else:
            source = load(source, record_bytes=size)
        check_engine(engine or source.name)
        return cls(
            source, namespace, serving=serving, costs=costs, engine=engine, near=near, ranks=ranks
        )

    # -- for callers that may wait ---------------------------------------------------------

    def store(
        self, blocks: Mapping[BlockKey, bytes | Buffer], seconds: float = 60.0
    ) -> list[BlockKey]:
        """Put payloads into the first tier and start the cascade; says which were taken and are
        held.

        A payload has exactly the size that the namespace states for its group. Where there is no
        room without evicting a block that has still to be written down, the call waits for that.
        Left out are keys that are resident already, and those without room within `seconds`.
        """
        keys = checked_keys(blocks)
        for key in keys:
            if len(blocks[key]) != self.namespace.payload_of(key):
                raise ValueError(
                    f"a payload of {len(blocks[key])} bytes, where the namespace says "
                    f"{self.namespace.payload_of(key)}"
                )
        end = time.monotonic() + seconds
        stored: list[BlockKey] = []
        for start in range(0, len(keys), _PIECE):
            left = keys[start : start + _PIECE]
            while left:
                with self._turn(end) as mine:
                    taken, left = self._store_some(left, blocks) if mine else ([], left)
                stored += taken
                if left and not taken:
                    if time.monotonic() >= end:
                        break
                    self.mover.wait(_WAIT_S)  # in which others have their turn
            if left:
                break
        self._unsettled.extend(stored)
        with self._turn(end) as mine:
            held = self.lookup(stored) if mine else stored
        return [key for key in stored if key in held]

    def _store_some(
        self, keys: list[BlockKey], blocks: Mapping[BlockKey, bytes | Buffer]
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Store what there is room for; says what that is, and what has none yet."""
        self.chain.poll()
        count = self.chain.room_beside_unwritten(len(keys), new=True)
        if not count:
            return [], keys
        taken = self._put(keys[:count], blocks)
        rest = [key for key in keys[:count] if key not in set(taken)]
        here = self.chain.tiers[0].lookup(rest)
        self.chain.poll()
        refused = [key for key, at in zip(rest, here, strict=True) if at is Presence.MISS]
        return taken, refused + keys[count:]

    def _put(
        self, keys: Sequence[BlockKey], blocks: Mapping[BlockKey, bytes | Buffer]
    ) -> list[BlockKey]:
        written: set[BlockKey] = set()
        reservation = self.chain.prepare_store(keys)
        try:
            self._write(reservation, blocks, written)
        finally:  # what cannot be written, as memory that is not of bytes, must keep no slot
            if not self._closed:  # by a signal's handler, which may end this process
                lost = dict.fromkeys(set(reservation.keys) - written, Outcome.CANCELLED)
                self.chain.complete_store(reservation.keys, lost)
        return reservation.keys

    def _write(
        self,
        reservation: Reservation,
        blocks: Mapping[BlockKey, bytes | Buffer],
        written: set[BlockKey],
    ) -> None:
        digest, parts = self.namespace.digest, self.namespace.parts or 1
        records = self.host.views(reservation.spec)
        for key, record in zip(reservation.keys, records, strict=True):
            payload = blocks[key]
            record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
            seal(record, Header(key, digest, len(payload), parts))
            written.add(key)

    def load(self, keys: Sequence[BlockKey], seconds: float = 30.0) -> dict[BlockKey, bytes]:
        """Fetch the payloads of those keys that are in any tier; every one is proved.

        What is not resident, fails, or is later than `seconds` is left out.
        """
        end = time.monotonic() + seconds
        payloads: dict[BlockKey, bytes] = {}
        left = checked_keys(keys)
        with self._turn(end) as mine:
            if not mine:
                return {}
            self.chain.touch(left)
            while left and time.monotonic() < end:
                piece, left = left[:_PIECE], left[_PIECE:]
                self._find(piece, end)
                while piece and time.monotonic() < end:
                    some, later = self._loadable(piece)
                    found = self.chain.lookup(some)
                    hits = [key for key, at in zip(some, found, strict=True) if at is Presence.HIT]
                    taken = self._fetch(hits, end, payloads)
                    if not taken and (some or not later):
                        break
                    # More than host memory has room for comes when the first have left.
                    piece = [key for key in piece if key not in taken]
        return payloads

    def _find(self, keys: Sequence[BlockKey], end: float) -> None:
        """Wait for what media say that have to be asked what they hold."""
        query = self.chain.find(keys)
        while not query.answered and time.monotonic() < end:
            self.mover.wait(_WAIT_S)
            self.chain.poll()

    def _loadable(self, keys: list[BlockKey]) -> tuple[list[BlockKey], set[BlockKey]]:
        """Of the keys that are held those in host memory, and as many as there is room for beside
        what is yet to be written down; and the others. Waits for some room if there is none."""
        held = self.lookup(keys)
        below = [key for key, medium in held.items() if medium != self.chain.tiers[0].medium]
        later = set(below[self.chain.room_beside_unwritten(len(below), new=False) :])
        some = [key for key in keys if key in held and key not in later]
        if later and not some:
            self.mover.wait(_WAIT_S)
            self.chain.poll()
        return some, later

    def _fetch(
        self, keys: Sequence[BlockKey], end: float, payloads: dict[BlockKey, bytes]
    ) -> set[BlockKey]:
        """Add what arrives to `payloads`; says which keys there was room to ask for."""
        self._requests += 1
        ticket = self.chain.begin_load(keys, f"stack-{self._requests}", end, proves=True)
        failed: dict[BlockKey, Outcome] = {}
        found: dict[BlockKey, bytes] = {}
        try:
            while not ticket.landed:
                self.mover.wait(_WAIT_S)
                self.chain.poll()
            found, failed = self._read(ticket)
            payloads |= found
        finally:  # Ctrl-C may come, and its slots must not be held for ever
            if not self._closed:
                self.chain.end_load(ticket, failed, proved=found)
        self.chain.poll()
        return set(ticket.keys)

    def _read(self, ticket: Ticket) -> tuple[dict[BlockKey, bytes], dict[BlockKey, Outcome]]:
        payloads: dict[BlockKey, bytes] = {}
        failed: dict[BlockKey, Outcome] = {}
        digest = self.namespace.digest
        for key, record in zip(ticket.keys, self.host.views(ticket.spec), strict=True):
            if key in ticket.failed:
                continue
            # Copies are proved, not what was copied: others could still change that.
            head = memoryview(bytes(record[:HEADER_BYTES]))
            payload = bytes(record[HEADER_BYTES : HEADER_BYTES + self.namespace.payload_of(key)])
            header = header_of(head, key, digest)
            if header is None or header.payload_bytes != len(payload):
                failed[key] = Outcome.CORRUPT
            elif (outcome := verify_payload(head, header, memoryview(payload))).ok:
                payloads[key] = payload
            else:
                failed[key] = outcome
        return payloads, failed

    def settle(self, seconds: float = 60.0) -> Settled:
        """Wait until all that was stored is written down; says whether it got there in time, and
        what was lost on the way."""
        end = time.monotonic() + seconds
        while True:
            late = time.monotonic() >= end
            with self._turn(end) as mine:
                if mine:
                    self.chain.poll()
                    if self.chain.settled or late:
                        return self._settled()
                elif late:
                    return Settled(False, [])
            self.mover.wait(_WAIT_S)  # in which others have their turn

    def _settled(self) -> Settled:
        done, stored = self.chain.settled, list(dict.fromkeys(self._unsettled))
        held = self.lookup(stored)
        if done:
            self._unsettled.clear()
        return Settled(done, [key for key in stored if key not in held])

    def lookup(self, keys: Sequence[BlockKey]) -> dict[BlockKey, str]:
        """The first medium that holds each of these, like "cpu"; what none holds is left out."""
        left = checked_keys(keys)
        found: dict[BlockKey, str] = {}
        with self._turn():
            for tier in self.chain.tiers:
                answers = tier.lookup(left)
                here = [key for key, at in zip(left, answers, strict=True) if at is Presence.HIT]
                found |= dict.fromkeys(here, tier.medium)
                left = [key for key in left if key not in found]
        return found

    def __contains__(self, key: BlockKey) -> bool:
        return bool(self.lookup([key]))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Drop these from every tier, for good. Slabs of a folder that other engines own keep what
        they hold: it is only hidden from this stack."""
        dropped = checked_keys(keys)
        with self._turn():
            self.chain.forget(dropped)
            gone = set(dropped)
            kept = [key for key in self._unsettled if key not in gone]
            self._unsettled = deque(kept, UNSETTLED_KEPT)
            for tier in self.chain.tiers:
                tier.flush()

    def stats(self) -> ChainStats:
        """The counters and gauges of every tier, and of the ways between them."""
        with self._turn():
            return self.chain.chain_stats()

    def summary(self) -> str:
        """What each tier holds, and what it may hold."""
        parts = []
        with self._turn():
            for tier in self.chain.tiers:
                tier.lookup([])  # which takes in what has just been found
                held = tier.stats()
                room = f"{size(held.bytes_used)} of {size(held.bytes_capacity)}"
                parts.append(f"{held.medium} {held.blocks:,} blocks ({room})")
        return ", ".join(parts)

    def close(self) -> None:
        """Close everything, once; committed blocks stay in tiers that keep them. In a process that
        was forked off it does nothing: locks and files are still the parent's."""
        if self._forked:
            return
        with self._turns:
            if not self._closed:  # else the numbers of its files may be others' by now
                self._closed = True
                rates = [self._rates] if self._rates else []
                close_all([*rates, self.mover, self.chain, self.host])

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    @contextlib.contextmanager
    def _turn(self, end: float = math.inf) -> Iterator[bool]:
        """This thread's turn; false if it has not come by then, as others wait for a slow tier."""
        if self._forked:
            raise NotOpen("this stack was opened before a fork, by the parent: open one here")
        left = max(0.0, end - time.monotonic())
        if not self._turns.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            yield False
            return
        try:
            if self._closed:
                raise NotOpen("this stack is closed: open it again")
            yield True
        finally:
            self._turns.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_tiers(config: StackConfig, wanted: TierContext) -> tuple[TierContext, list[Tier]]:
    """All tiers, under the first engine name whose private media nobody uses."""
    name = wanted.engine
    for number in range(1, _ENGINES_MAX + 1):
        engine = name if number == 1 else f"{name}~{number}"  # as no stack may be called
        context = msgspec.structs.replace(wanted, engine=engine)
        tiers: list[Tier] = []
        try:
            for settings in config.tiers:
                tier = backend(settings.kind).open_tier(settings, context)
                fenced = tiers and settings.kind not in kinds(built_in=True)
                tiers.append(IsolatedTier(tier) if fenced else tier)
        except MediumInUse:
            close_all(tiers)
            if number == _ENGINES_MAX:
                raise
            continue
        except BaseException:
            close_all(tiers)
            raise
        if number > 1:
            logger.warning(_NAME_IN_USE, name, engine)
        return context, tiers
    raise AssertionError("the last round returns or raises")


def _keep_rates(
    config: StackConfig, namespace: Namespace, costs: CostModel, ranks: int
) -> RateKeeper | None:
    folder = rates_folder(config)
    if folder is None:
        return None
    return RateKeeper(RatesFile(folder, rate_owner(config, namespace.facts, ranks)), costs)


def _open_mover(config: StackConfig, context: TierContext, *, serving: bool) -> Mover:
    mode = config.mover.mode
    if mode is MoverMode.PROCESS or (mode is MoverMode.AUTO and serving):
        return ProcessMover(config.tiers, context, prefetch_share=config.prefetch.link)
    handlers: list[Handler] = []
    try:
        for settings in config.tiers:
            handlers.append(backend(settings.kind).open_handler(settings, context))
    except BaseException:
        close_all(handlers)
        raise
    queues = [settings.queue_blocks for settings in config.tiers]
    return ThreadMover(
        handlers,
        context.namespace,
        queue_blocks=queues,
        prefetch_share=config.prefetch.link,
    )
