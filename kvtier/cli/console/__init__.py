"""How commands speak to people and to programs, ask, and end; `from kvtier.cli import console`.

`output.py` has lines, warnings and JSON, `tables.py` tables, `progress.py` the line that says how
far something has come, `questions.py` what is asked before something goes. `exits.py` has exit
codes and errors. `options.py` has the options that several commands share, `plots.py` their SVG
files. `interrupts.py` keeps Ctrl-C out of what must not be cut in two, and `foreground.py` runs a
server in the foreground of a terminal.
"""

from kvtier.cli.console.exits import (
    EXIT_CLOSED_PIPE,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    end_output,
    explain,
    report_crash,
)
from kvtier.cli.console.options import HELP, new_app
from kvtier.cli.console.output import (
    note,
    plain,
    print_json,
    say,
    say_wrapped,
    speak_for_log,
    stdout,
    warn,
)
from kvtier.cli.console.progress import Progress, progress
from kvtier.cli.console.questions import confirm
from kvtier.cli.console.tables import fits, print_table, print_values
from kvtier.errors import naming, said_of

__all__ = [
    "EXIT_CLOSED_PIPE",
    "EXIT_FAILURE",
    "EXIT_OK",
    "EXIT_USAGE",
    "HELP",
    "Progress",
    "confirm",
    "end_output",
    "explain",
    "fits",
    "naming",
    "new_app",
    "note",
    "plain",
    "print_json",
    "print_table",
    "print_values",
    "progress",
    "report_crash",
    "said_of",
    "say",
    "say_wrapped",
    "speak_for_log",
    "stdout",
    "warn",
]
