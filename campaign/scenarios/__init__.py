"""The scenarios, by name."""

from __future__ import annotations

from campaign.round import Scenario
from campaign.scenarios.damage import Damage
from campaign.scenarios.kills import Commands, Kills, Movers
from campaign.scenarios.limits import Disks, Limits
from campaign.scenarios.media import Media
from campaign.scenarios.power import Power
from campaign.scenarios.serving import Day, Serving, ServingDay
from campaign.scenarios.shared import Bucket, Clocks, Shared

SCENARIOS: dict[str, Scenario] = {
    each.name: each
    for each in (
        *(Damage(), Kills(), Movers(), Commands(), Power(), Shared(), Bucket(), Clocks(), Media()),
        *(Disks(), Limits(), Day(), Serving(), ServingDay()),
    )
}
