"""``antiphon top``: a live view of a deployment, read from the metrics of its processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from antiphon.cluster.top_figures import (
    Interval,
    PoolRow,
    Reading,
    Service,
    Transfers,
    pool_rows,
    service,
    transfers,
)
from antiphon.protocol.errors import AntiphonError

TIMEOUT_S = 2.0
STATE_STYLES = {"ready": "green", "up": "yellow", "draining": "cyan", "down": "bold red"}


class MetricsUnreachable(AntiphonError):
    """The supervisor's pages cannot be read; the message names the URL."""


class MetricsClient:
    """Reads every process that the supervisor names."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """``url``: base of the supervisor's pages, as ``antiphon serve`` prints it."""
        self._url = url.rstrip("/")
        # A router's certificate is for the name that its clients use, not for its address.
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False, transport=transport)

    def close(self) -> None:
        """Hang up."""
        self._http.close()

    def read(self) -> tuple[Reading, dict[str, Reading]]:
        """The supervisor's metrics, and those of each process that answers, by its name.

        Raises:
            MetricsUnreachable: the supervisor does not answer, or something else does.
        """
        try:
            own = self._http.get(f"{self._url}/metrics").raise_for_status()
            targets = self._http.get(f"{self._url}/targets").raise_for_status().json()
            supervisor = Reading.parse(time.monotonic(), own.text)
            named = [(g["labels"]["process"], _url(g)) for g in targets]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise MetricsUnreachable(f"{self._url}: no metrics of a supervisor: {error}") from error
        readings = {}
        for name, url in named:
            try:
                text = self._http.get(url).raise_for_status().text
            except httpx.HTTPError:
                continue  # shown as down: it has just died, or is starting
            readings[name] = Reading.parse(time.monotonic(), text)
        return supervisor, readings


def _url(group: Mapping[str, Mapping[str, str]]) -> str:
    (target,) = group["targets"]
    return f"{group['labels'].get('__scheme__', 'http')}://{target}/metrics"


def top(url: str, interval_s: float, *, once: bool) -> None:
    """Show a deployment until Ctrl-C, or once.

    Raises:
        MetricsUnreachable: see ``MetricsClient``.
    """
    client, console = MetricsClient(url), Console()
    _, before = client.read()
    try:
        if once:
            time.sleep(interval_s)
            console.print(view(url, *client.read(), before))
            return
        with Live(Text("reading ..."), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                supervisor, after = client.read()
                live.update(view(url, supervisor, after, before), refresh=True)
                before = after
    except KeyboardInterrupt:
        return
    finally:
        client.close()


def view(
    url: str, supervisor: Reading, after: Mapping[str, Reading], before: Mapping[str, Reading]
) -> RenderableType:
    """The whole screen, from two readings of every process."""
    intervals = {name: Interval(before.get(name, now), now) for name, now in after.items()}
    routers = [i for name, i in intervals.items() if name.startswith("router")]
    workers = {name: i for name, i in intervals.items() if not name.startswith("router")}
    models = {labels.get("model_name", "") for labels, _ in supervisor.matching("build_info")}
    heading = Text.assemble(("antiphon ", "bold"), ", ".join(sorted(models)), ("  " + url, "dim"))
    return Group(
        heading,
        _service_panel(service(routers)),
        _pool_table(pool_rows(supervisor, workers)),
        _transfer_panel(transfers(list(workers.values()))),
    )


def _service_panel(now: Service) -> Panel:
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"in flight [bold]{now.in_flight}[/]",
        f"queued [bold]{now.queued}[/]",
        f"requests [bold]{now.requests_per_s:.1f}[/]/s",
        f"output [bold]{now.output_tokens_per_s:.0f}[/] tokens/s",
        f"errors [bold]{now.errors_per_s:.1f}[/]/s",
        f"retries [bold]{now.retries}[/]",
    )
    table.add_row(
        f"TTFT p50 ≤ [bold]{seconds(now.ttft_p50_s)}[/]",
        f"p90 ≤ [bold]{seconds(now.ttft_p90_s)}[/]",
        f"ITL p50 ≤ [bold]{seconds(now.itl_p50_s)}[/]",
        f"p90 ≤ [bold]{seconds(now.itl_p90_s)}[/]",
    )
    return Panel(table, title="service", title_align="left")


def _pool_table(rows: list[PoolRow]) -> Table:
    table = Table(expand=True, title_justify="left")
    for name in ("worker", "state", "running", "waiting", "KV pages", "quarantined", "tokens/s"):
        table.add_column(name, justify="left" if name in ("worker", "state", "KV pages") else "right")
    table.add_column("batch", justify="right")
    table.add_column("restarts", justify="right")
    for row in sorted(rows, key=lambda row: (row.role != "prefill", row.worker)):
        table.add_row(
            row.worker,
            f"[{STATE_STYLES[row.state]}]{row.state}[/]",
            str(row.running),
            str(row.waiting),
            bar(row.pages_share),
            str(row.quarantined),
            f"{row.tokens_per_s:.0f}",
            "-" if row.mean_batch is None else f"{row.mean_batch:.1f}",
            str(row.restarts),
        )
    return table


def _transfer_panel(now: Transfers) -> Panel:
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"in flight [bold]{now.in_flight}[/]",
        f"[bold]{rate_of_bytes(now.bytes_per_s)}[/]",
        f"writes [bold]{now.writes_per_s:.0f}[/]/s",
        f"write p90 ≤ [bold]{seconds(now.write_p90_s)}[/]",
        f"exposed tail p90 ≤ [bold]{seconds(now.tail_p90_s)}[/]",
        f"failures [bold]{now.failures}[/]",
    )
    return Panel(table, title="KV transfers", title_align="left")


def bar(share: float, width: int = 12) -> str:
    """A share as a bar and a percentage."""
    filled = min(width, round(share * width))
    return f"{'█' * filled}{'░' * (width - filled)} {share:4.0%}"


def seconds(value: float | None) -> str:
    """A duration for people; a dash when nothing happened."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "∞"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def rate_of_bytes(per_s: float) -> str:
    """Bytes per second for people, in decimal units."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if per_s < 1000:
            return f"{per_s:.3g} {unit}"
        per_s /= 1000
    return f"{per_s:.3g} GB/s"
