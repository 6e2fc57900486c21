"""What has become of the blocks of a copy, and how it is said."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer

from kvtier.cli import console
from kvtier.observe import human


class Copied(msgspec.Struct):
    """What has become of the blocks of one namespace."""

    namespace: str
    asked: int = 0
    already_there: int = 0
    copied: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the first read to the last commit."""
    bad: int = 0
    """Failed their check when they were read."""
    unread: int = 0
    """Could not be read: their store or disk failed."""
    gone: int = 0
    """Were no longer there when they were to be read."""
    not_stored: int = 0
    missing: int = 0
    """Prompts ask for them, and the source does not have them."""
    left: int = 0
    """Not asked for, because of the size that was given or that the tier has."""
    untold: int = 0
    """Are in a store that does not tell of them: it could not be written down."""
    full: bool = False
    """There was no room for more: engines that share the tier hold it, or it is too small."""
    skipped: str = ""
    """Why nothing of it was copied."""

    @property
    def whole(self) -> bool:
        """Whether everything that could be read is where it should be."""
        left_behind = self.bad or self.unread or self.not_stored or self.untold or self.skipped
        return not (left_behind or self.all_gone)

    @property
    def all_gone(self) -> bool:
        """Some blocks may go while they are copied. If all have, they went before."""
        return 0 < self.asked == self.gone


def report(
    done: Sequence[Copied],
    source: str,
    troubles: Sequence[str],
    json: bool,
    *,
    may_skip: bool = False,
) -> None:
    """Say what was copied; ends with a failure if something is missing. `source` is where it was.
    `may_skip`: it is none to skip a namespace of which nothing was asked for, unless there is no
    other."""
    skipped = [each for each in done if each.skipped]
    rest = [each for each in done if not each.skipped]
    excused = [each for each in skipped if rest and may_skip and not each.asked]
    ok = not troubles and all(each.whole or each in excused for each in done)
    if json:
        console.print_json({"ok": ok, "namespaces": done, "troubles": troubles})
    elif not done and not troubles:
        console.say(f"there is nothing to copy: nothing in {source} tells of blocks")
    elif rest:
        _show(rest)
    for each in skipped:
        console.warn(f"namespace {each.namespace[:12]} is skipped: {each.skipped}")
    if untold := sum(each.untold for each in done):
        console.warn(
            f"{untold} blocks are not written down in the store, because that failed: they may be "
            "there, but only a listing would find them; run it again once the store is well"
        )
    if any(each.full for each in done):
        console.warn(
            "the tier had no room for the rest: it is full, its disk is (free_floor counts), its "
            "store went away, or an engine that runs there holds it - kvtier doctor and kvtier du "
            "say which; give it more room, stop the engine meanwhile, or copy less with --size"
        )
    elif gone := [each for each in rest if each.all_gone]:
        asked = sum(each.asked for each in gone)
        console.warn(f"all {asked} blocks are gone that the source says it has: see kvtier verify")
    elif not all(each.whole for each in rest) and not untold:
        console.warn("some blocks are missing: run it again, or see kvtier verify and kvtier du")
    for trouble in troubles:
        console.warn(trouble)
    if troubles or not ok:
        raise typer.Exit(console.EXIT_FAILURE)


def _show(done: Sequence[Copied]) -> None:
    columns = ["namespace", "asked", "there", "copied", "size", "bad"]
    columns += ["unread", "gone", "not stored"]
    rows = [
        [
            each.namespace[:12],
            each.asked,
            each.already_there,
            each.copied,
            human.size(each.bytes),
            each.bad,
            each.unread,
            each.gone,
            each.not_stored,
        ]
        for each in done
    ]
    console.print_table(columns, rows, numbers=columns[1:])
    if moved := sum(each.bytes for each in done):
        seconds = sum(each.seconds for each in done)
        rate = human.rate(moved / seconds)
        console.say(f"{human.size(moved)} in {human.duration(seconds)}, {rate}")
    if left := sum(each.left for each in done):
        console.say(f"{left} blocks are left out: beyond --size, or 95 % of the tier's capacity")
    if missing := sum(each.missing for each in done):
        console.say(f"{missing} blocks that the prompts ask for are not in the source")
