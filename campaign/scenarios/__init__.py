"""The scenarios, by name; one file each."""

from __future__ import annotations

from campaign.round import Scenario
from campaign.scenarios.clocks import Clocks
from campaign.scenarios.commands import Commands
from campaign.scenarios.damage import Damage
from campaign.scenarios.day import Day
from campaign.scenarios.disks import Disks
from campaign.scenarios.kills import Kills
from campaign.scenarios.limits import Limits
from campaign.scenarios.media import Media
from campaign.scenarios.movers import Movers
from campaign.scenarios.power import Power
from campaign.scenarios.serving import Serving
from campaign.scenarios.shared import Shared

SCENARIOS: dict[str, Scenario] = {
    each.name: each
    for each in (
        *(Damage(), Kills(), Movers(), Commands(), Power(), Shared(), Clocks(), Media()),
        *(Disks(), Limits(), Day(), Serving()),
    )
}
