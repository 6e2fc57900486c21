"""`kvtier top`: what servers do with their cache, in a terminal or on a page, while they serve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from kvtier import amounts
from kvtier.cli import console, options
from kvtier.cli.top.figures import (
    COMPUTED,
    ENGINE,
    LOADED,
    Period,
    ServerFigures,
    TierFigures,
    Trouble,
    Watch,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

app = options.new_app()

_LOCAL = "http://localhost:8000"
_PORT = 8090
_WIDTH_MIN = 78
"""Of one server's figures: as many servers stand beside each other as have so much."""
_NAMES = {COMPUTED: "computed", ENGINE: "engine's own"}
_GAP = 2
_TIERS_WIDTH = 80
"""Of the table of tiers without a bar."""
_BAR_MIN = 8
# Of the terminal's own palette what can be read on dark and on light: no white, black or yellow.
_GOOD, _BAD, _WARNING, _TITLE, _ASIDE = "green", "bold red", "bold", "bold", "dim"


@app.command(
    epilog="Examples: kvtier top; kvtier top http://gpu1:8000 gpu2:8000; kvtier top --once; "
    "kvtier top --page --port 9000"
)
def top(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL]...", help=f"Servers; else {_LOCAL}.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture.")] = False,
    every: Annotated[
        float,
        typer.Option(
            parser=options.parse_duration, metavar="TIME", help="How often to look; else every 2s."
        ),
    ] = 2.0,
    page: Annotated[
        bool, typer.Option("--page", help="Serve it as a page, to browsers of this machine alone.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"The page's port; else {_PORT}.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show what servers do with their cache: where prompts come from, how full and how busy each
    tier is, first tokens with and without it, misses and trouble.

    It reads /metrics, every 2 s, until Ctrl-C; to a file or a pipe it prints one picture. Exit code
    1 if a server of a single picture cannot be read.
    """
    if every < 0.1:
        raise typer.BadParameter("is too often; write at least 100ms", param_hint="--every")
    options.only_with("--page", page or None, port=port)
    watch = Watch([_base(each) for each in servers or [_LOCAL]])
    if page:
        from kvtier.cli.top.page import serve_page

        serve_page(watch, every, _PORT if port is None else port)
    elif once or json or not console.stdout().is_terminal:
        figures = watch.look()
        if json:
            console.print_json(figures)
        else:
            console.stdout().print(picture(figures, console.stdout().width))
        if any(each.problem for each in figures):
            raise typer.Exit(console.EXIT_FAILURE)
    else:
        _show(watch, every)


def _base(text: str) -> str:
    """A server's address, as people write it."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
    except ValueError:  # as of a bracket that is not closed
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"{text!r} is no server; write http://host:8000")
    if parts.username is not None:
        raise typer.BadParameter("a password would be shown; leave it out of the address")
    return url.rstrip("/").removesuffix("/metrics")


def _show(watch: Watch, every: float) -> None:
    from rich.live import Live

    terminal = console.stdout()
    with Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            live.update(picture(watch.look(), terminal.width), refresh=True)
            time.sleep(max(0.0, every - (time.monotonic() - begin)))


# -- pictures --------------------------------------------------------------------------------------


def picture(figures: Sequence[ServerFigures], width: int) -> Table:
    """All servers, side by side where there is room."""
    from rich.table import Table

    beside = max(1, min(len(figures), (width + _GAP) // (_WIDTH_MIN + _GAP)))
    each_width = (width + _GAP) // beside - _GAP
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(beside):
        grid.add_column(width=each_width)
    for first in range(0, len(figures), beside):
        if first:
            grid.add_row()
        grid.add_row(*(_server(each, each_width) for each in figures[first : first + beside]))
    return grid


def _server(figures: ServerFigures, width: int) -> Table:
    from rich.table import Table

    whole = Table.grid()
    whole.add_row(_title(figures))
    if figures.problem or not figures.tiers:
        whole.add_row(_text(figures.problem, _BAD) if figures.problem else "no request yet")
        return whole
    for part in (
        _shares(figures.periods, width),
        _tiers(figures.tiers, width),
        _first_tokens(figures.periods),
        _rest(figures),
    ):
        whole.add_row()
        whole.add_row(part)
    return whole


def _title(figures: ServerFigures) -> Text:
    said = _text(figures.url, _TITLE)
    if figures.model:
        said.append(f"  {console.plain(figures.model)}")
    if figures.uptime is not None:
        said.append(f"  up {amounts.age(figures.uptime)}")
    if not figures.problem:
        said.append(f"  {figures.running:.0f} running, {figures.waiting:.0f} waiting")
    return said


def _shares(periods: Sequence[Period], width: int) -> Table:
    """Where prompt tokens came from."""
    columns = ["prompt tokens from", "", *_headings(periods)]
    table = _table(columns, left=2)
    room = max(8, width - sum(map(len, columns)) - (len(columns) - 1) * _GAP)
    for source in periods[-1].shares:
        shares = [each.shares.get(source) for each in periods]
        style = _ASIDE if source == COMPUTED else _GOOD
        bar = _text(amounts.bar(shares[0] or 0.0, 1.0, room), style)
        table.add_row(_name(source), bar, *map(_percent, shares))
    table.add_row("all", "", *(amounts.count(each.prompt_tokens) for each in periods))
    return table


def _tiers(tiers: Sequence[TierFigures], width: int) -> Table:
    names = ["tier", "hits/s", "read", "written", "waiting", "retained", "used", "of"]
    room = min(40, width - _TIERS_WIDTH)
    table = _table([*names, ""] if room >= _BAR_MIN else names)
    for tier in tiers:
        cells = [
            amounts.count(tier.hits),
            amounts.rate(tier.read),
            amounts.rate(tier.written),
            amounts.count(tier.waiting),
            amounts.count(tier.retained),
            amounts.size(tier.used),
            amounts.size(tier.capacity),
        ]
        if room >= _BAR_MIN:
            cells.append(amounts.bar(tier.used, tier.capacity, room))
        table.add_row(_text(tier.kind, _BAD if tier.down else ""), *cells)
    return table


def _first_tokens(periods: Sequence[Period]) -> Table:
    """With the cache, then without, and how many requests with how long prompts these were."""
    each = [name for heading in _headings(periods) for name in (heading, "requests", "prompt")]
    table = _table(["first tokens", *each])
    for way in sorted(periods[-1].first_tokens, key=lambda way: (way != LOADED, way)):
        cells = []
        for period in periods:
            found = period.first_tokens.get(way)
            cells += ["-", "", ""] if found is None else [
                amounts.duration(found.seconds),
                amounts.count(found.requests),
                amounts.count(found.tokens),
            ]  # fmt: skip
        table.add_row(_name(way), *cells)
    return table


def _rest(figures: ServerFigures) -> Table:
    """Lines of a name and what there is to say."""
    from rich.table import Table

    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style=_TITLE, no_wrap=True)
    table.add_column()
    misses = sorted(figures.periods[-1].misses.items(), key=lambda each: -each[1])
    said = (f"{amounts.count(count)} {console.plain(reason)}" for reason, count in misses)
    table.add_row("missed tokens", ", ".join(said) or "none")
    table.add_row("in the mover", f"{amounts.count(figures.in_mover)} blocks")
    for index, trouble in enumerate(figures.troubles):
        table.add_row("" if index else "trouble", _trouble(trouble))
    if not figures.troubles:
        table.add_row("trouble", "none")
    return table


def _trouble(trouble: Trouble) -> Text:
    if not trouble.total:
        return _text(trouble.what, _BAD)
    style = "" if not trouble.lately else _BAD if trouble.grave else _WARNING
    lately = f", {amounts.count(trouble.lately)} in the last minute" if trouble.lately else ""
    return _text(f"{amounts.count(trouble.total)} {trouble.what}{lately}", style)


def _headings(periods: Sequence[Period]) -> list[str]:
    lately = [f"in {amounts.duration(each.seconds)}" for each in periods[:-1]]
    return [*lately, "since start"]


def _table(columns: Sequence[str], left: int = 1) -> Table:
    """Numbers behind `left` columns of names."""
    from rich.table import Table

    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style=_TITLE)
    for index, name in enumerate(columns):
        text = index < left or not name
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    return table


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(console.plain(text), style)


def _name(source: str) -> str:
    return _NAMES.get(source, console.plain(source))


def _percent(share: float | None) -> str:
    return "-" if share is None else amounts.share(share, 1.0)
