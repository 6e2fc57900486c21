"""For all tests: property tests take the same examples every time, unless they hunt, and as long as
they need; and Ctrl-C is heard, by what is tested, too, though a shell's background ignores it."""

import os
import signal
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from kvtier.testing import stateful

settings.register_profile(
    "kvtier",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # so may the machine be
)
settings.register_profile(
    "hunt", settings.get_profile("kvtier"), derandomize=False, max_examples=1000
)
settings.load_profile("kvtier")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FIGURE = "figure"


# What engines of tests learn is nothing to those that are served on this machine.
_STATE = tempfile.TemporaryDirectory(prefix="kvtier-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") == "hunt":
        stateful.SETTINGS = settings(stateful.SETTINGS, derandomize=False)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Shows a line at the end of the run; it travels there in the test's report."""
    return lambda line: record_property(FIGURE, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, line in report.user_properties:
                    if name == FIGURE:
                        terminalreporter.write_line(line)
