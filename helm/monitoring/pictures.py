"""Draw the dashboards from a Prometheus, for readers who have no Grafana at hand.

python helm/monitoring/pictures.py http://127.0.0.1:9090 --minutes 3 --folder docs/dashboards
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

DASHBOARDS = Path(__file__).resolve().parents[1] / "antiphon/files/dashboards"
GRID_COLUMNS = 24
ROW_INCHES = 0.36
"""Height of one row of Grafana's grid."""
LEGEND_ENTRIES = 8
POINTS = 90
UNITS = {
    "s": "s",
    "percentunit": "share",
    "reqps": "per s",
    "ops": "per s",
    "Bps": "bytes/s",
    "bytes": "bytes",
}

Series = list[dict[str, Any]]


def ask(url: str, expression: str, start: float, end: float) -> Series:
    """The series of an expression between two times, as ``POINTS`` points."""
    step = max((end - start) / POINTS, 1.0)
    query = {"query": expression, "start": start, "end": end, "step": step}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}") as answer:
        found: Series = json.loads(answer.read())["data"]["result"]
    return found


def legend(template: str, labels: dict[str, str]) -> str:
    """A series' name, from Grafana's template."""
    if template == "__auto":
        return ", ".join(value for key, value in sorted(labels.items()) if key != "__name__")
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template)


def points(series: dict[str, Any], start: float) -> tuple[list[float], list[float]]:
    """Seconds since ``start`` and values; what is no number is a gap."""
    times = [float(at) - start for at, _ in series["values"]]
    return times, [float(value) if math.isfinite(float(value)) else math.nan for _, value in series["values"]]


def draw_lines(axes: Axes, panel: dict[str, Any], answers: list[tuple[str, Series]], start: float) -> None:
    """A panel of curves, or stacked ones."""
    curves = [
        (legend(template, series["metric"]), *points(series, start))
        for template, found in answers
        for series in found
    ]
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    if stacked and curves:
        longest = max((times for _, times, _ in curves), key=len)
        layers = [np.interp(longest, times, np.nan_to_num(values)) for _, times, values in curves]
        axes.stackplot(longest, layers, labels=[name for name, _, _ in curves], alpha=0.8)
    else:
        for name, times, values in curves:
            axes.plot(times, values, label=name, linewidth=1.2)
    if 0 < len(curves) <= LEGEND_ENTRIES or stacked:
        axes.legend(fontsize=5.5, loc="upper left", framealpha=0.6, ncols=1 + (len(curves) > 4))
    axes.set_ylim(bottom=0)
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    axes.set_ylabel(UNITS.get(unit, ""), fontsize=6)
    axes.margins(x=0)


def draw_density(axes: Axes, answers: list[tuple[str, Series]], start: float) -> None:
    """A heat map of a histogram's buckets."""
    bounds = {float(s["metric"]["le"]): points(s, start) for _, found in answers for s in found}
    finite = sorted(bound for bound in bounds if math.isfinite(bound))
    if not finite:
        return
    times = max((bounds[bound][0] for bound in finite), key=len)
    cumulative = [np.interp(times, bounds[bound][0], np.nan_to_num(bounds[bound][1])) for bound in finite]
    cells = np.diff(np.vstack([np.zeros(len(times)), *cumulative]), axis=0).clip(min=0)
    used = np.flatnonzero(cells.sum(axis=1) > 0)
    if not len(used):
        return
    first, last = used[0], used[-1] + 1
    shown = np.where(cells[first:last] > 0, cells[first:last], np.nan)
    edges = [finite[first - 1] if first else finite[0] / 2, *finite[first:last]]
    times_edges = np.append(times, times[-1] + 1)
    axes.pcolormesh(times_edges, edges, shown, cmap="viridis", norm=LogNorm(), rasterized=True)
    axes.set_yscale("log")


def draw_number(axes: Axes, answers: list[tuple[str, Series]]) -> None:
    """One number as of the end."""
    values = [float(series["values"][-1][1]) for _, found in answers for series in found]
    axes.text(0.5, 0.5, f"{values[0]:.3g}" if values else "-", ha="center", va="center", fontsize=16)
    axes.set_axis_off()


def draw(board: dict[str, Any], url: str, window: str, start: float, end: float, path: Path) -> None:
    """One dashboard as a picture, laid out as Grafana does."""
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(13, rows * ROW_INCHES + 0.5))
    height = figure.get_figheight()
    figure.suptitle(board["title"], fontsize=12, y=1 - 0.1 / height)
    grid = figure.add_gridspec(rows, GRID_COLUMNS, hspace=4, wspace=3, top=1 - 0.7 / height)
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(
            grid[place["y"] : place["y"] + place["h"] - 1, place["x"] : place["x"] + place["w"] - 1]
        )
        axes.set_title(panel["title"], fontsize=7.5, loc="left")
        axes.tick_params(labelsize=6)
        answers = []
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", window).replace("$model", ".+")
            answers.append((target.get("legendFormat", "__auto"), ask(url, text, start, end)))
        if panel["type"] == "stat":
            draw_number(axes, answers)
        elif panel["type"] == "heatmap":
            draw_density(axes, answers, start)
        else:
            draw_lines(axes, panel, answers, start)
    figure.savefig(path, dpi=75, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    """Draw every dashboard but that of GPUs, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back")
    parser.add_argument("--window", default="30s", help="what rates are taken over")
    parser.add_argument("--folder", type=Path, default=Path("docs/dashboards"))
    parser.add_argument("--board", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.time()
    for file in sorted(DASHBOARDS.glob("*.json")):
        if file.stem in (options.board or ()) or (file.stem != "gpu" and not options.board):
            path = options.folder / f"{file.stem}.png"
            board = json.loads(file.read_text())
            draw(board, options.prometheus, options.window, end - options.minutes * 60, end, path)
            sys.stderr.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
