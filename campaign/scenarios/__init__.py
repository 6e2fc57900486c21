"""The scenarios, by name; one file each."""

from __future__ import annotations

from campaign.round import Scenario
from campaign.scenarios.commands import Commands
from campaign.scenarios.damage import Damage
from campaign.scenarios.kills import Kills
from campaign.scenarios.media import Media
from campaign.scenarios.movers import Movers
from campaign.scenarios.power import Power
from campaign.scenarios.serving import Serving
from campaign.scenarios.shared import Shared

SCENARIOS: dict[str, Scenario] = {
    each.name: each
    for each in (Damage(), Kills(), Movers(), Commands(), Power(), Shared(), Media(), Serving())
}
