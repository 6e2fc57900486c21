"""Suites that any backend can subclass to prove itself: docs/contributing/testing.md says how."""

import sys

SUITES = (
    "contract",
    "contract_inspection",
    "contract_medium",
    "contract_moves",
    "fault_suite",
    "mover",
    "stateful",
    "subject",
)

if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
