"""Plots as SVG text: bars and lines, nothing else, so that no plotting package is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 50, 60
_COLOURS = ("#3366cc", "#dc7633", "#2e8b57", "#8e44ad", "#c0392b", "#7f8c8d", "#b7950b", "#17a2b8")
_BAR, _GAP = 18, 14


def bars(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Horizontal bars: one group a row, one bar a series in it."""
    series = list(dict.fromkeys(name for values in rows.values() for name in values))
    top = max((value for values in rows.values() for value in values.values()), default=0.0) or 1.0
    room = _WIDTH - 2 * _LEFT - _RIGHT
    body, y = [], _TOP
    for name, values in rows.items():
        middle = y + _BAR * len(values) / 2
        body.append(_text(_LEFT + 30, middle + 4, name, "end"))
        for label, value in values.items():
            length = max(1.0, room * value / top)
            colour = _COLOURS[series.index(label) % len(_COLOURS)]
            body.append(
                f'<rect x="{_LEFT + 40}" y="{y}" width="{length:.1f}" height="{_BAR - 3}" '
                f'fill="{colour}"/>'
            )
            body.append(_text(_LEFT + 46 + length, y + 12, f"{value:.4g} {unit}"))
            y += _BAR
        y += _GAP
    return _page(title, max(y + 10, _TOP + 20 * len(series) + 20), body, series)


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = False,
) -> str:
    """Lines through points; `logarithmic` concerns the axis across."""
    points = [point for line in series.values() for point in line]
    if not points:
        return _page(title, _HEIGHT, [], [])
    xs = [x for x, _ in points]
    low, high = min(xs), max(xs)
    top = max(y for _, y in points) or 1.0
    if logarithmic and low <= 0:
        raise ValueError("a logarithmic axis needs values above zero")
    scale = math.log if logarithmic else float
    span = (scale(high) - scale(low)) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + width * (scale(x) - scale(low)) / span,
            _TOP + height * (1 - y / top),
        )

    body = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" '
        'stroke="#999"/>'
    ]
    for step in range(5):
        _, y = place(low, top * step / 4)
        body.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        )
        body.append(_text(_LEFT - 6, y + 4, f"{top * step / 4:.3g}", "end"))
    for x in _ticks(sorted(set(xs))):
        body.append(_text(place(x, 0)[0], _TOP + height + 18, f"{x:.4g}", "middle"))
    body.append(_text(_LEFT + width / 2, _HEIGHT - 14, across, "middle"))
    body.append(_text(_LEFT, _TOP - 8, up))
    for index, line in enumerate(series.values()):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(line))
        colour = _COLOURS[index % len(_COLOURS)]
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return _page(title, _HEIGHT, body, list(series))


def _ticks(values: Sequence[float]) -> Sequence[float]:
    """At most seven of them, evenly chosen."""
    return values[:: max(1, -(-len(values) // 7))]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(title: str, height: float, body: Sequence[str], legend: Sequence[str]) -> str:
    keys = []
    for index, name in enumerate(legend):
        y = _TOP + 20 * index
        colour = _COLOURS[index % len(_COLOURS)]
        keys.append(f'<rect x="{_WIDTH - _RIGHT + 20}" y="{y}" width="12" height="12" ')
        keys[-1] += f'fill="{colour}"/>'
        keys.append(_text(_WIDTH - _RIGHT + 38, y + 11, name))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>',
            f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
            *body,
            *keys,
            "</svg>",
            "",
        ]
    )
