"""Suites that any backend can subclass to prove itself: docs/contributing/testing.md says how.

- `subject`: what a backend's author states of it. Begin here.
- `contract`, `contract_medium`: what every tier promises, sentence by sentence.
- `stateful`: any tier, step by step beside the memory tier of `memory`.
- `faults`: a disk that fails, and a tier on it.
"""

import sys

SUITES = ("contract", "contract_medium", "faults", "stateful", "subject")

if pytest := sys.modules.get("pytest"):
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
