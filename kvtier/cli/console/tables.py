"""Tables, and names with their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.cli.console.output import OUTPUT, plain, say, stdout
from kvtier.errors import naming

_FOLDED_COLUMNS = 3
_NAME_COLUMNS = 40
"""Names are filled up to the longest, at most to this: any may come from elsewhere, and be long."""
_GAP = 2
"""Between two columns of a table."""


def fits(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
    """Whether a table fits the terminal, without a cell that is broken into lines."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    return sum(widths) + _GAP * (len(columns) - 1) <= stdout().width


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()
) -> None:
    """A table; `numbers` names the columns that are aligned to the right.

    Where it does not fit, rows with many columns are written as names and values.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if len(columns) > _FOLDED_COLUMNS and not fits(columns, rows):
        for index, row in enumerate(rows):
            if index:
                say()
            print_values(dict(zip(columns, row, strict=True)))
        return
    right = (0, _GAP - 1, 0, 0)  # the rest of the gap is where rich would draw a line
    table = Table(box=box.SIMPLE_HEAD, padding=right, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    with naming(OUTPUT):
        stdout().print(table)


def print_values(values: Mapping[str, object]) -> None:
    """Names and values under each other."""
    width = min(max(map(len, values), default=0), _NAME_COLUMNS)
    for name, value in values.items():
        say(f"{name:<{width}}  {value}")
