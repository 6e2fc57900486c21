"""Parsers of figures: what is left of a write budget, what a drive counts, what links and engine
were found to do."""

from __future__ import annotations

import struct
from pathlib import Path

from campaign.fuzz.media import resum
from campaign.fuzz.targets import Target
from kvtier.backends.nvme.drives import parse as parse_counters
from kvtier.backends.nvme.wear import Entry, WriteLedger, pack
from kvtier.cost import rates as kept_rates
from kvtier.cost.model import CostModel
from kvtier.cost.rates import KeptLink, KeptPrefill, Owner, Rates

_NOW = 1_700_000_000.0
_RATE, _BURST = 1e6, 3.6e9
_JSON = (b'"', b"[", b"]", b"{", b"}", b"null", b"1e999", b"-1", b"[[[[", b'"\\ud800"', b"NaN")


def targets(folder: Path) -> list[Target]:
    """All of them; files lie in this folder."""
    return [_budget(folder), _counters(), _rates()]


def _budget(folder: Path) -> Target:
    """As an engine's keeper leases from it, because a file that cannot be read is mended there."""
    root = folder / "budget"
    root.mkdir()
    ledger = WriteLedger(root, _RATE, _BURST, lambda: _NOW)
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        ledger.path.write_bytes(resum(data, 56) if next(turn) % 2 else data)
        granted, told = ledger.exchange(4096.0, 1e8)
        assert 0.0 <= granted <= 1e8
        assert told.level <= _BURST
        left = ledger.look()
        assert left is None or left.level <= _BURST
        granted, told = ledger.exchange(0.0, -4096.0, 1.0)
        assert granted == -4096.0
        assert told.level <= _BURST

    entries = [Entry(_RATE, _BURST, level, _NOW - 9, 1e12, _NOW - 1e6) for level in (1e9, -1e6)]
    numbers = [struct.pack("<d", value) for value in (0.0, -1.0, 1e24, 1e308, 5e-324)]
    words = [*numbers, struct.pack("<d", float("nan")), struct.pack("<d", float("inf"))]
    return Target(
        name="write budget",
        corpus=[pack(entry) for entry in entries],
        parse=parse,
        typed=(),
        words=words,
        share=0.2,
    )


def _counters() -> Target:
    """What nvme-cli answers."""

    def parse(data: bytes) -> None:
        drive = parse_counters("/dev/nvme0n1", data)
        assert bool(drive.problem) == (drive.written is None)
        assert drive.written is None or drive.written >= 0
        assert drive.percent_used is None or 0 <= drive.percent_used <= 255

    corpus = [
        b'{"critical_warning": 0, "percent_used": 3, "data_units_written": 123456}',
        b'{"data_units_written": "18446744073709551615", "percent_used": "255"}',
    ]
    words = [*_JSON, b'"data_units_written": ', b"percent_used", b"1_0", "٣".encode()]
    return Target(name="drive's counters", corpus=corpus, parse=parse, typed=(), words=words)


def _rates() -> Target:
    """Kept rates, and a cost model that begins with them."""
    owner = Owner("machine", "device", "model", "stack")
    links = {"nvme": KeptLink(0.001, 0.2), "device": KeptLink(0.0, 0.05)}
    prefill = KeptPrefill(0.01, 0.001, 8192)

    def parse(data: bytes) -> None:
        kept = kept_rates.decode(data)
        model = CostModel(clock=lambda: _NOW)
        model.recall(kept.rates)
        model.publish()
        again = kept_rates.decode(kept_rates.encode(owner, model.latest))
        assert again.rates == model.latest

    return Target(
        name="kept rates",
        corpus=[kept_rates.encode(owner, Rates(links, prefill))],
        parse=parse,
        typed=(ValueError,),
        words=_JSON,
    )
