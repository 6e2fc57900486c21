"""`kvtier du`: how full each tier is, with what, and a picture of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.inspect import AnyInspector, end_with_troubles, look
from kvtier.config import load
from kvtier.inspect.contents import Cell, Writes

app = options.new_app()

_SLABS_SHOWN = 16
_UNKNOWN = "unknown"


@app.command(epilog="Example: kvtier du --config stack.yaml")
def du(
    config: options.ConfigOption,
    tier: options.TierOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show how full each tier is, and what its slabs hold: "·" is free, "░▒▓" partly full, "█"
    full, "x" quarantined.

    Used is what the blocks take; allocated are the files and memory in which they lie, and these
    count against the capacity. It reads from outside: a running engine does not notice. What could
    not be read is "unknown" (null in JSON), and the exit code is 1 then.
    """
    stack = load(config, to_write=False)
    inspectors = look(stack, options.tier_of(tier, stack), uses_of="")
    if json:
        console.print_json([_plain(each) for each in inspectors])
    else:
        for index, each in enumerate(inspectors):
            if index:
                console.say()
            _show(each)
    end_with_troubles(inspectors)


def _plain(inspector: AnyInspector) -> dict[str, object]:
    contents = inspector.contents
    used = None if contents.unseen else sum(part.bytes for part in contents.parts)
    return {
        "tier": inspector.tier,
        "kind": inspector.kind,
        "where": contents.where,
        "capacity": contents.capacity,
        "allocated": None if contents.unseen else contents.used,
        "used": used,
        "free": contents.free,
        "blocks": None if contents.unseen else sum(part.blocks for part in contents.parts),
        "block_bytes": used,
        "namespaces": msgspec.to_builtins(contents.parts),
        "strangers": contents.strangers,
        "writes": msgspec.to_builtins(inspector.writes()),
        "troubles": contents.troubles,
    }


def _show(inspector: AnyInspector) -> None:
    contents = inspector.contents
    width = max(10, min(60, console.stdout().width - 20))
    console.say(f"{inspector.tier} {inspector.kind}  {contents.where}")
    used = sum(part.bytes for part in contents.parts)
    if contents.capacity is not None and not contents.unseen:
        share = amounts.share(used, contents.capacity)
        console.say(f"  {amounts.bar(used, contents.capacity, width)} {share}")
    held = f"{amounts.size(used)} by {sum(part.blocks for part in contents.parts)} blocks"
    values: dict[str, object] = {"  used": _UNKNOWN if contents.unseen else held}
    if contents.capacity is not None:
        values["  allocated"] = _UNKNOWN if contents.unseen else amounts.size(contents.used)
        values["  capacity"] = amounts.size(contents.capacity)
    if contents.free is not None:
        values["  free there"] = amounts.size(contents.free)
    writes = inspector.writes()
    if writes is not None:
        values |= _written(writes)
    console.print_values(values)
    for part in contents.parts:
        room = contents.capacity or contents.used
        bar = amounts.bar(part.bytes, room, max(5, width // 4))
        hits = "" if part.hits is None else f", {part.hits} hits"
        console.say(f"  {part.namespace[:12]}  {bar} {amounts.size(part.bytes)}{hits}")
    slabs = inspector.slot_maps()
    for slab in slabs[:_SLABS_SHOWN]:
        console.say(f"  {slab.name[:10]:>10} {_picture(slab.cells(width))}")
    if len(slabs) > _SLABS_SHOWN:
        console.say(f"  ... and {len(slabs) - _SLABS_SHOWN} more slabs")
    if contents.strangers:
        names = ", ".join(contents.strangers[:3]).replace("\n", "\ufffd")
        console.say(f"  also there, not kvtier's: {names} ({len(contents.strangers)} in all)")


def _written(writes: Writes) -> dict[str, object]:
    """What was written to a medium that wears, and what may be."""
    values: dict[str, object] = {}
    if writes.written is not None and writes.since is not None:
        age = amounts.duration(max(0.0, time.time() - writes.since))
        values["  written"] = f"{amounts.size(writes.written)} in {age}"
    if writes.per_day is not None:
        left = "" if writes.left is None else f", {amounts.size(writes.left)} now"
        values["  may be written"] = f"{amounts.size(writes.per_day)} a day{left}"
    for number, drive in enumerate(writes.drives, 1):
        said = drive.problem
        if drive.written is not None:
            said = f"{amounts.size(drive.written)} written, {drive.percent_used} % of its life used"
        name = f"{drive.device}: " if drive.device else ""
        values["  drive" + f" {number}" * (len(writes.drives) > 1)] = f"{name}{said}"
    return values


def _picture(cells: Iterable[Cell]) -> str:
    """How full each stretch of slots is, and what is quarantined."""
    shades = "·░▒▓█"
    return "".join("x" if bad else shades[min(4, round(full * 4 + 0.3))] for full, bad in cells)
