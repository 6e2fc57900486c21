"""The scenarios, by name; one file each."""

from __future__ import annotations

from campaign.round import Scenario
from campaign.scenarios.damage import Damage
from campaign.scenarios.kills import Kills
from campaign.scenarios.movers import Movers
from campaign.scenarios.power import Power

SCENARIOS: dict[str, Scenario] = {each.name: each for each in (Damage(), Kills(), Movers(), Power())}
