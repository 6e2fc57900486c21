"""`kvtier du`: how full each tier is, with what, and a picture of it."""

from __future__ import annotations

import msgspec

from kvtier.cli import console, options
from kvtier.cli.holdings import Place, look, picture
from kvtier.config import load
from kvtier.observe import human

app = console.new_app()

_SLABS_SHOWN = 16
_UNKNOWN = "unknown"


@app.command(epilog="Example: kvtier du --config stack.yaml")
def du(
    config: options.ConfigOption,
    tier: options.TierOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show how full each tier is, and what its slabs hold: "·" is free, "█" full, "x" quarantined.

    Files count against a tier's capacity with their whole length, used or not. It reads from
    outside: a running engine does not notice. What could not be read is "unknown" (null in JSON),
    and the exit code is 1 then.
    """
    stack = load(config, to_write=False)
    places = look(stack, options.tier_of(tier, stack), uses_of="")
    if json:
        console.print_json([_plain(place) for place in places])
    else:
        for index, place in enumerate(places):
            if index:
                console.say()
            _show(place)
    console.end_with_troubles(places)


def _plain(place: Place) -> dict[str, object]:
    return {
        "tier": place.tier,
        "kind": place.kind,
        "where": place.where,
        "capacity": place.capacity,
        "used": None if place.unseen else place.used,
        "free": place.free,
        "blocks": None if place.unseen else sum(part.blocks for part in place.parts),
        "block_bytes": None if place.unseen else sum(part.bytes for part in place.parts),
        "namespaces": msgspec.to_builtins(place.parts),
        "strangers": place.strangers,
        "troubles": place.troubles,
    }


def _show(place: Place) -> None:
    width = max(10, min(60, console.stdout().width - 20))
    console.say(f"{place.tier} {place.kind}  {place.where}")
    if place.capacity is not None and not place.unseen:
        share = human.share(place.used, place.capacity)
        console.say(f"  {human.bar(place.used, place.capacity, width)} {share}")
    blocks = sum(part.blocks for part in place.parts)
    held = f"{blocks} ({human.size(sum(part.bytes for part in place.parts))})"
    values: dict[str, object] = {}
    if place.capacity is not None:
        values["  capacity"] = human.size(place.capacity)
        values["  taken"] = _UNKNOWN if place.unseen else human.size(place.used)
    values["  blocks"] = _UNKNOWN if place.unseen else held
    if place.free is not None:
        values["  free there"] = human.size(place.free)
    console.print_values(values)
    for part in place.parts:
        room = place.capacity or place.used
        bar = human.bar(part.bytes, room, max(5, width // 4))
        hits = "" if part.hits is None else f", {part.hits} hits"
        console.say(f"  {part.namespace[:12]}  {bar} {human.size(part.bytes)}{hits}")
    for slab in place.slabs[:_SLABS_SHOWN]:
        console.say(f"  {slab.engine[:10]:>10} {picture(slab, width)}")
    if len(place.slabs) > _SLABS_SHOWN:
        console.say(f"  ... and {len(place.slabs) - _SLABS_SHOWN} more slabs")
    if place.strangers:
        names = ", ".join(place.strangers[:3]).replace("\n", "\ufffd")
        console.say(f"  also there, not kvtier's: {names} ({len(place.strangers)} in all)")
