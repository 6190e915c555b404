"""``antiphon bench serve``: from options to a load, a run and its reports."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from antiphon.benchmarks import records
from antiphon.benchmarks.serve.arrivals import WorkloadError, parse_arrivals
from antiphon.benchmarks.serve.client import Kind, Target, prepare
from antiphon.benchmarks.serve.html import render_html
from antiphon.benchmarks.serve.lengths import parse_lengths
from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.outputs import check_writable
from antiphon.benchmarks.serve.report import Document, report
from antiphon.benchmarks.serve.runner import Limits, Run, run_closed_loop, run_open_loop
from antiphon.benchmarks.serve.server_metrics import read_stages
from antiphon.benchmarks.serve.slo import Slo
from antiphon.benchmarks.serve.workload import (
    Session,
    Shape,
    closed_loop,
    exact_poisson,
    open_loop,
    read_trace,
    standing,
)
from antiphon.protocol.errors import AntiphonError


class LoadFailed(AntiphonError):
    """No measured request was answered."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a user may ask; texts are those of the command line."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "auto"
    rate_per_s: float = 1.0
    arrivals: str = "poisson"
    users: int | None = None
    """Closed loop with so many users; open loop when None."""
    trace: Path | None = None
    time_scale: float = 1.0
    requests: int | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0
    exact_counts: bool = False
    """Poisson arrivals of which as many as on average fall into the warm-up, and into the rest."""
    standing: int = 0
    """Open loop: requests in service that the load begins with, sent within the first half of the warm-up."""
    input_tokens: str = "1000"
    output_tokens: str = "200"
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1
    turns: int = 1
    turn_tokens: str | None = None
    think_s: float = 0.0
    force_length: bool = True
    extra: Mapping[str, object] | None = None
    max_in_flight: int = 4096
    request_timeout_s: float = 600.0
    drain_s: float = 120.0
    seed: int = 0
    slo: tuple[str, ...] = ()
    """Sets of objectives; the goodput under each is reported."""
    output: Path | None = None
    html: Path | None = None

    def asked(self, target: Target) -> dict[str, object]:
        """For the report; never the key."""
        values = {
            key: value for key, value in asdict(self).items() if key not in ("api_key", "output", "html")
        }
        values["trace"] = None if self.trace is None else str(self.trace)
        values |= {
            "model": target.model,
            "endpoint": target.path,
            "prompts": target.kind,
            "url": target.base_url,
        }
        return values


STANDING_SHARE = 0.5
"""Of the warm-up: in the rest of it the standing requests settle."""
KINDS: dict[str, Kind | None] = {"auto": None, "completions": "token-ids", "chat": "chat"}


def make_sessions(options: Options) -> list[Session]:
    """The workload of the options.

    Raises:
        WorkloadError: the options contradict one another or cannot be used.
    """
    if options.trace is not None:
        if options.users is not None:
            raise WorkloadError("trace and users exclude each other: a trace has its own times")
        sessions = read_trace(options.trace, time_scale=options.time_scale, limit=options.requests)
        if options.duration_s is not None:
            sessions = [each for each in sessions if each.arrives_s <= options.duration_s]
        return sessions
    shape = Shape(
        parse_lengths(options.input_tokens, "input-tokens"),
        parse_lengths(options.output_tokens, "output-tokens"),
        options.shared_prefix_tokens,
        options.prefix_groups,
        options.turns,
        None if options.turn_tokens is None else parse_lengths(options.turn_tokens, "turn-tokens"),
        options.think_s,
    )
    begun = standing(shape, options.seed, options.standing, options.warmup_s * STANDING_SHARE)
    if options.users is not None:
        if begun:
            raise WorkloadError("standing requests are those of an open loop: users are there from the start")
        if options.users < 1:
            raise WorkloadError(f"users {options.users}: at least 1")
        if options.requests is None:
            raise WorkloadError("a closed loop needs a number of requests")
        return closed_loop(shape, options.seed, options.requests)
    arrivals = parse_arrivals(options.arrivals, options.rate_per_s)
    if options.exact_counts:
        if options.arrivals != "poisson" or options.duration_s is None or options.requests is not None:
            raise WorkloadError("exact counts are of Poisson arrivals within a duration")
        arriving = exact_poisson(
            shape, options.rate_per_s, options.seed, options.duration_s, options.warmup_s
        )
    else:
        arriving = open_loop(
            shape, arrivals, options.seed, sessions=options.requests, duration_s=options.duration_s
        )
    return sorted(begun + arriving, key=lambda session: session.arrives_s)


def check(options: Options) -> None:
    """Raise for a bound that is no bound.

    Raises:
        WorkloadError: names the option.
    """
    if options.endpoint not in KINDS:
        raise WorkloadError(f"endpoint {options.endpoint!r}: expected {', '.join(KINDS)}")
    if (
        options.max_in_flight < 1
        or options.warmup_s < 0
        or options.drain_s < 0
        or options.request_timeout_s <= 0
    ):
        raise WorkloadError(
            "max-in-flight at least 1, warm-up and drain at least 0, request timeout positive"
        )


async def measure(options: Options, progress: Progress | None = None) -> tuple[Run, Document]:
    """Run the load and describe it.

    Raises:
        WorkloadError: the options cannot be used.
        ServerUnusable: the server cannot be measured.
    """
    check(options)
    slos = [Slo.parse(each) for each in options.slo]
    sessions = make_sessions(options)
    target = await prepare(
        options.url,
        kind=KINDS[options.endpoint],
        model=options.model,
        api_key=options.api_key,
        force_length=options.force_length,
        timeout_s=options.request_timeout_s,
    )
    target = replace(target, extra=options.extra)
    limits = Limits(options.max_in_flight, options.warmup_s, options.drain_s, _length_s(options))
    tick = _Ticker(progress, sum(len(session.turns) for session in sessions))
    before = await read_stages(target.base_url)
    if options.users is None:
        run = await run_open_loop(target, sessions, limits, tick)
    else:
        run = await run_closed_loop(target, sessions, options.users, limits, tick)
    stages = (await read_stages(target.base_url)).mean_since(before)
    return run, report(run, options.asked(target), slos, stages)


def _length_s(options: Options) -> float:
    """Of an open loop that its duration ends, and nothing else; 0 of others."""
    other_end = options.users is not None or options.requests is not None or options.trace is not None
    return 0.0 if other_end else options.duration_s or 0.0


def run_command(options: Options) -> None:
    """Measure with a progress bar, print the tables, write the files.

    Raises:
        WorkloadError, ServerUnusable: as of ``measure``.
        OutputUnusable: a file could not be written; nothing is sent.
        LoadFailed: no measured request was answered; the files are written first.
    """
    check_writable(options.output, options.html)
    console = Console(stderr=True)
    columns = (
        TextColumn("load"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        run, document = uvloop.run(measure(options, progress))
    if options.output is not None:
        records.write_json(options.output, document)
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(render_html(run, document))
    print_tables(document)
    requests = document["requests"]
    if not requests["answered"]:
        errors = ", ".join(f"{text} ({count})" for text, count in requests["errors"].items())
        raise LoadFailed(
            f"none of {requests['measured']} measured requests was answered: {errors or 'all were warm-up'}"
        )


def print_tables(document: Document) -> None:
    """Latency, rates and complaints on standard output."""
    console = Console()
    latency, rates, requests = document["latency_s"], document["rates"], document["requests"]
    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max")
    for name, summary in latency.items():
        cells = [summary[c] for c in ("mean", "p50", "p90", "p95", "p99", "max")]
        table.add_row(name.upper(), *("–" if c is None else f"{c * 1e3:,.2f}" for c in cells))
    console.print(table)
    console.print(
        f"answered {requests['answered']} of {requests['measured']} measured ({requests['warmup']} warm-up), "
        f"{rates['answered_requests_per_s']:.2f} requests/s, "
        f"{rates['output_tokens_per_s']:,.1f} output and {rates['input_tokens_per_s']:,.1f} input tokens/s"
    )
    for good in document["goodput"]:
        console.print(
            f"goodput {good['requests_per_s']:.2f}/s, {good['share']:.1%} of requests: {good['objectives']}"
        )
    for text, count in requests["errors"].items():
        console.print(f"{count} x {text}", style="red", markup=False)
    health = document["generator_health"]
    for complaint in health["complaints"]:
        console.print(f"note: {complaint}", style="yellow", markup=False)


class _Ticker:
    """Moves the progress bar, if there is one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._failed = progress, 0
        self._task = None if progress is None else progress.add_task("load", total=total, state="")

    def __call__(self, seen: Observation) -> None:
        self._failed += seen.error is not None
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, advance=1, state=f"{self._failed} failed" if self._failed else ""
            )
