"""Suites that any backend can subclass to prove itself: docs/contributing/testing.md says how.

- `subject`: what a backend's author states of it. Begin here.
- `contract`: what every tier promises, sentence by sentence; `contract_parts` has the sentences.
- `stateful`: any tier, step by step beside the memory tier.
- `fault_suite`, `faults`: a tier on a disk that fails.
- `crash_campaign`, `crash_processes`: writers that are killed at random instants.
- `mover`, `mover_rig`: what every mover promises.
- `memory_folders`: folders in shared memory that do not outlive who made them.
- `media`, `records`, `handler_process`: small media, blocks and processes that the suites use.
"""

import sys

SUITES = (
    "contract",
    "contract_parts.catalogue",
    "contract_parts.inspection",
    "contract_parts.medium",
    "contract_parts.moves",
    "contract_parts.pins",
    "contract_parts.restarts",
    "fault_suite",
    "mover",
    "mover_rig",
    "stateful",
    "subject",
)

if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
