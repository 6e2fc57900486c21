"""`kvtier verify`: read blocks back and check every record, and take bad ones out of use."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.inspect import (
    Inspectors,
    blocks_of,
    bounded_map,
    find_namespace,
    look,
    parts_of,
    provers_of,
    troubles_of,
)
from kvtier.config import load
from kvtier.errors import KVTierError, MediumInUse, Unsupported, describe_error
from kvtier.inspect import Block, Proof

app = options.new_app()

_THREADS = 4
_SHOWN = 50


class Found(msgspec.Struct):
    """What a verification has come to."""

    counts: dict[str, int]
    bytes: int = 0
    bad: list[tuple[Block, str]] = []
    unread: list[tuple[Block, str]] = []


def _parse_sample(text: str) -> str:
    """The value of --sample, if it is one."""
    with contextlib.suppress(ValueError):
        if 0 < float(text[:-1]) <= 100 if text.endswith("%") else int(text) > 0:
            return text
    raise typer.BadParameter(f"{text!r}: write a number of blocks, or 1% to 100%")


@app.command(
    epilog="Examples: kvtier verify -c stack.yaml; kvtier verify -c stack.yaml --sample 5%; "
    "kvtier verify -c stack.yaml --tier nvme --repair"
)
def verify(
    config: options.ConfigOption,
    namespace: options.NamespaceOption = None,
    tier: options.TierOption = None,
    sample: Annotated[
        str | None,
        typer.Option(
            parser=_parse_sample, metavar="N|P%", help="Only so many blocks, chosen at random."
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Quarantine or remove what is bad.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Read blocks, and check the header, key, namespace and checksums of each.

    Without --repair nothing is written, and a running engine does not notice. With it, bad blocks
    are quarantined, broken slabs and bad objects removed, where no running engine owns them. What a
    newer kvtier wrote is left alone. Exit code 1 if anything is bad, or could not be read.
    """
    stack = load(config, to_write=False)
    inspectors = look(stack, options.tier_of(tier, stack))
    chosen = "" if namespace is None else find_namespace(inspectors, namespace)
    parts = [part for part in parts_of(inspectors) if part.namespace.startswith(chosen)]
    total = sum(part.blocks for part in parts)
    wanted = total if sample is None else _sample_size(sample, total)
    sound = (block for block in blocks_of(inspectors, chosen) if not block.quarantined)
    found = Found({proof.value: 0 for proof in Proof})
    try:
        _prove(inspectors, _draw(sound, total, wanted), wanted, found)
    except KeyboardInterrupt:
        _say_interrupted(found, wanted)
        raise
    found.counts["quarantined"] = sum(part.quarantined for part in parts)
    left: list[str] = []
    repaired, broken = 0, troubles_of(inspectors)
    if repair:
        repaired, left = _repair(inspectors, found, chosen)
        stay = [*troubles_of(inspectors), *left]
        broken = [said for said in broken if said not in stay]
    removed = [said.partition("; ")[0] for said in broken] if repair else []
    _report(found, inspectors, repaired if repair else None, removed, left, json)


def _sample_size(text: str, total: int) -> int:
    if text.endswith("%"):
        return max(1, round(total * float(text[:-1]) / 100))
    return min(total, int(text))


def _draw(blocks: Iterable[Block], total: int, wanted: int) -> Iterator[Block]:
    """Draw some of all blocks, each as likely as any other. If all are wanted, those that are
    stored meanwhile are, too."""
    chance = random.Random()
    for block in blocks:
        if wanted >= total or chance.random() * total < wanted:
            wanted -= 1
            yield block
        total -= 1
        if wanted <= 0 and total > 0:
            return


def _prove(inspectors: Inspectors, blocks: Iterable[Block], expected: int, found: Found) -> None:
    """Check blocks, and add to what was found."""
    with (
        provers_of(inspectors) as provers,
        console.progress("checking", expected, "blocks") as bar,
    ):
        proved = bounded_map(
            lambda block: provers[block.tier].prove(block)[:2],
            blocks,
            _THREADS,
            lambda block: provers[block.tier].bytes_of(block),
        )
        for block, (proof, why) in proved:
            found.counts[proof.value] += 1
            found.bytes += block.bytes
            if proof is Proof.BAD:
                found.bad.append((block, why))
            elif proof is Proof.UNREAD:
                found.unread.append((block, why))
            bar.advance(1, block.bytes)


def _say_interrupted(found: Found, wanted: int) -> None:
    """What was found until then: hours may have gone into it."""
    with contextlib.suppress(OSError):  # the terminal may have gone
        for block, why in found.bad[:_SHOWN]:
            console.warn(f"{block.where}: {why}")
        checked = sum(found.counts.values())
        console.warn(f"interrupted: {checked} of {wanted} blocks were checked: {_counted(found)}")


def _counted(found: Found) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
    return counts or "no blocks"


def _repair(inspectors: Inspectors, found: Found, namespace: str) -> tuple[int, list[str]]:
    """Take out of use what is bad; how many blocks, and what was left and why."""
    repaired, left = 0, []
    for each in inspectors:
        by_home: dict[str, list[Block]] = {}
        for block in (block for block, _ in found.bad if block.tier == each.tier):
            by_home.setdefault(each.home_of(block), []).append(block)
        for blocks in by_home.values():
            try:
                repaired += each.quarantine(blocks)
            except (MediumInUse, Unsupported) as error:
                left.append(f"{len(blocks)} bad blocks stay: {error}")
            except (KVTierError, OSError) as error:
                left.append(describe_error(error))
    for each in inspectors:
        left += each.remove_broken(namespace)
    return repaired, left


def _report(
    found: Found,
    inspectors: Inspectors,
    repaired: int | None,
    removed: list[str],
    left: list[str],
    json: bool,
) -> None:
    troubles = troubles_of(inspectors) + left
    for block, why in found.unread[:_SHOWN]:
        troubles.append(f"{block.where}: cannot be read: {why}")
    ok = not (troubles or len(found.bad) > (repaired or 0))
    if json:
        bad = [
            {"tier": b.tier, "key": b.key.hex(), "namespace": b.namespace, "where": b.where}
            | {"why": why}
            for b, why in found.bad
        ]
        console.print_json(
            {
                "ok": ok,
                "counts": found.counts,
                "bytes": found.bytes,
                "bad": bad,
                "repaired": repaired,
                "removed": removed,
                "troubles": troubles,
            }
        )
    else:
        if found.bad:
            rows = [
                [f"{b.tier} {b.kind}", b.key.hex()[:24], b.where, why]
                for b, why in found.bad[:_SHOWN]
            ]
            console.print_table(["tier", "key", "where", "why"], rows)
        if len(found.bad) > _SHOWN:
            console.say(f"... and {len(found.bad) - _SHOWN} more that are bad: --json names all")
        console.say(f"{amounts.size(found.bytes)} read: {_counted(found)}")
        if repaired is not None:
            console.say(f"{repaired} bad blocks taken out of use")
            for broken in removed:
                console.say_wrapped(f"removed, with what was in it: {broken}")
        elif found.bad:
            console.say("to take them out of use: stop their engines, then kvtier verify --repair")
    for trouble in troubles:
        console.warn(trouble)
    if not ok:
        raise typer.Exit(console.EXIT_FAILURE)
