"""The few kinds of panels that the dashboards are made of."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as dashboard_builder
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
WINDOW = "$__rate_interval"

Panel = timeseries.Panel | stat.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel and the name of its series, with ``{{label}}`` for a label's value."""

    expression: str
    legend: str = ""


def lines(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    minimum: float | None = 0,
    maximum: float | None = None,
    width: int = 12,
) -> timeseries.Panel:
    """Curves over time; ``text`` is what the reader sees on hovering over the title."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(8)
        .fill_opacity(60 if stacked else 5)
        .legend(
            common_builder.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if stacked:
        panel.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL))
    if minimum is not None:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(
            prometheus.Dataquery()
            .ref_id(letter)
            .expr(query.expression)
            .legend_format(query.legend or "__auto")
            .range()
        )
    return panel


def number(title: str, text: str, unit: str, query: Query, *, width: int = 4) -> stat.Panel:
    """One number as of now, with its course behind it."""
    return (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(4)
        .reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(
            prometheus.Dataquery().ref_id("A").expr(query.expression).legend_format(query.legend).range()
        )
    )


def density(title: str, text: str, metric: str, matchers: str, unit: str = "s") -> heatmap.Panel:
    """How the observations of a histogram are spread, over time."""
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(DATASOURCE)
        .span(12)
        .height(8)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(
            prometheus.Dataquery()
            .ref_id("A")
            .expr(f"sum by (le) (rate({metric}_bucket{{{matchers}}}[{WINDOW}]))")
            .format(PromQueryFormat.HEATMAP)
            .legend_format("{{le}}")
            .range()
        )
    )


def row(title: str) -> dashboard_builder.Row:
    """A heading between panels."""
    return dashboard_builder.Row(title)


def quantiles(metric: str, matchers: str, *shares: float, by: str = "") -> tuple[Query, ...]:
    """Quantiles of a histogram over all routers; ``by`` keeps a label apart."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{matchers}}}[{WINDOW}])))",
            f"p{share * 100:g}{legend}",
        )
        for share in shares
    )


def mean(metric: str, matchers: str, *, by: str = "", legend: str = "mean") -> Query:
    """Average of a histogram's observations."""
    group = f"sum by ({by}) " if by else "sum"
    parts = [f"{group}(rate({metric}_{part}{{{matchers}}}[{WINDOW}]))" for part in ("sum", "count")]
    return Query(" / ".join(parts), f"{{{{{by}}}}}" if by else legend)
