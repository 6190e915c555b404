"""Charts as inline SVG: lines, points and bars on linear or logarithmic axes. No script, no font, no network.

The output is a function of the data alone (fixed number formats), so that a generated page can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, TOP, BOTTOM = 64, 34, 48
MARGIN, LEGEND = 16, 150
"""Right of the plot: without and with names of series."""
COLOURS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5", "#9f6b53", "#787774", "#e03e3e")


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together; ``dashed`` marks what is predicted."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    line: bool = True
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """Title with its unit, and the scale."""

    title: str
    log: bool = False

    def place(self, value: float, low: float, high: float) -> float:
        """Position of a value in [0, 1] between the ends."""
        if self.log:
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return (value - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = field(default_factory=tuple)

    def render(self) -> str:
        """An ``<svg>`` element; says so when there is nothing to draw."""
        points = [point for series in self.series for point in series.points if self._drawable(point)]
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="sans-serif" font-size="12"><title>{escape(self.title)}</title>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="18" font-weight="bold">{escape(self.title)}</text>',
        ]
        if points:
            xs, ys = _ends([p[0] for p in points], self.x.log), _ends([p[1] for p in points], self.y.log)
            parts += self._grid(xs, ys)
            for index, series in enumerate(self.series):
                parts += self._series(series, COLOURS[index % len(COLOURS)], xs, ys)
            parts += self._legend()
        else:
            parts.append(f'<text x="{LEFT}" y="{HEIGHT // 2}">no figures yet</text>')
        return "\n".join([*parts, "</svg>"])

    @property
    def _right(self) -> int:
        return WIDTH - (LEGEND if len(self.series) > 1 else MARGIN)

    def _drawable(self, point: tuple[float, float]) -> bool:
        finite = all(math.isfinite(value) for value in point)
        return finite and (not self.x.log or point[0] > 0) and (not self.y.log or point[1] > 0)

    def _grid(self, xs: tuple[float, float], ys: tuple[float, float]) -> list[str]:
        parts = []
        for value in _ticks(*xs, self.x.log):
            at = LEFT + self.x.place(value, *xs) * (self._right - LEFT)
            parts.append(_line(at, TOP, at, HEIGHT - BOTTOM))
            parts.append(_text(at, HEIGHT - BOTTOM + 16, _number(value), "middle"))
        for value in _ticks(*ys, self.y.log):
            at = HEIGHT - BOTTOM - self.y.place(value, *ys) * (HEIGHT - TOP - BOTTOM)
            parts.append(_line(LEFT, at, self._right, at))
            parts.append(_text(LEFT - 6, at + 4, _number(value), "end"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(_text((LEFT + self._right) / 2, HEIGHT - 10, self.x.title, "middle"))
        parts.append(
            f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
            f"{escape(self.y.title)}</text>"
        )
        return parts

    def _series(
        self, series: Series, colour: str, xs: tuple[float, float], ys: tuple[float, float]
    ) -> list[str]:
        places = [
            (
                LEFT + self.x.place(x, *xs) * (self._right - LEFT),
                HEIGHT - BOTTOM - self.y.place(y, *ys) * (HEIGHT - TOP - BOTTOM),
            )
            for x, y in filter(self._drawable, series.points)
        ]
        dash = ' stroke-dasharray="6 4"' if series.dashed else ""
        parts = []
        if series.line and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if series.marks:
            fill = "#ffffff" if series.dashed else colour
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{colour}"/>'
                for x, y in places
            ]
        return parts

    def _legend(self) -> list[str]:
        parts: list[str] = []
        if len(self.series) < 2:
            return parts
        for index, series in enumerate(self.series):
            colour, y = COLOURS[index % len(COLOURS)], TOP + 12 + 16 * index
            dash = ' stroke-dasharray="6 4"' if series.dashed else ""
            x = self._right + 8
            parts.append(
                f'<line x1="{x}" y1="{y - 4}" x2="{x + 20}" y2="{y - 4}" stroke="{colour}" '
                f'stroke-width="2"{dash}/>'
            )
            parts.append(_text(x + 26, y, series.name, "start"))
        return parts


def bars(title: str, unit: str, rows: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, one per row, labelled with the value."""
    height, left = TOP + 24 * len(rows) + 8, 150
    top = max((value for _, value in rows), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(rows):
        y = TOP + 24 * index
        width = max(0.0, value) / top * (WIDTH - left - 110)
        parts.append(_text(left - 8, y + 13, name, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{COLOURS[0]}"/>')
        parts.append(_text(left + width + 6, y + 13, f"{_number(value)} {unit}", "start"))
    return "\n".join([*parts, "</svg>"])


def _ends(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return (low / 1.1, high * 1.1) if low == high else (low, high)
    low = min(low, 0.0)
    return (low, high + 1.0) if low == high else (low, high * 1.05)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        decades = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        return [value for value in decades if low * 0.999 <= value <= high * 1.001]
    raw = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    count = math.floor((high - low) / step)
    return [low + index * step for index in range(count + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e2e0"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
