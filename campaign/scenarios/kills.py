"""Writers of one medium that are killed: at a call, at a step of the bytecode, by the clock."""

from __future__ import annotations

import object_subjects
import subjects

from campaign.round import Round, Scenario
from kvtier.testing.crash_campaign import Broken, Campaign
from kvtier.testing.subject import Subject

_KILLS = 48
_MEDIA: tuple[tuple[str, Subject, int], ...] = (
    ("cpu", subjects.CPU, 1),
    ("nvme", subjects.NVME, 1),
    ("object folder", object_subjects.FOLDER, 1),
    ("object folder, 4 engines", object_subjects.FOLDER, 4),
    ("nvme, 2 engines", subjects.SLABS, 2),
    ("nvme, 8 engines", subjects.SLABS, 8),
)


class Kills(Scenario):
    name = "kills"
    about = (
        "Engine stand-ins with their keepers are killed in the middle of storing, loading, "
        "evicting and dropping. The next process serves what was committed, with its right bytes, "
        "and nothing that was dropped; the capacity holds; what the dead had reserved is free."
    )
    share = 2.0

    def play(self, round: Round) -> None:
        medium, subject, engines = _MEDIA[round.number % len(_MEDIA)]
        home = round.folder / "medium"
        home.mkdir()
        campaign = Campaign(subject, home, round.dice.randrange(1 << 20), engines)
        try:
            campaign.run(_KILLS, lambda: round.counts.update(["looks at what they left"]))
        except Broken as broken:
            round.found(f"{medium}: {broken}")
        for kind, count in campaign.deaths.items():
            round.counts["kills"] += count
            round.counts[f"kills, when: {kind}"] += count
            round.counts[f"kills, {medium}"] += count
        round.counts["commits"] += campaign.books.committed
        round.counts["evictions"] += campaign.books.evicted
        round.counts["blocks found and proved"] += campaign.proved
