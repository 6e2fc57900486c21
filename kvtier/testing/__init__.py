"""Suites that any backend can subclass to prove itself: docs/contributing/testing.md says how."""

import sys

SUITES = (
    "contract",
    "contract_catalogue",
    "contract_inspection",
    "contract_medium",
    "contract_moves",
    "contract_pins",
    "contract_restarts",
    "fault_suite",
    "mover",
    "mover_rig",
    "stateful",
    "subject",
)

if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
