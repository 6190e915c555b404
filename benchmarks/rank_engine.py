"""Prompts and decode steps through the real engine over the ranks of one worker, one model in one layout.

As ``engine``: prompt in to first token out, and the time between two commits, with the serving sampler. Each
rank synthesizes its part of the weights on its own GPU. A first prompt and a few steps go untimed before each
figure, so that nothing is compiled, connected or captured meanwhile. ``--ways`` picks among

    replayed    decode steps, and chunks of prompts, as graphs that all ranks replay
    launched    both issued launch by launch

Figures are kept as they come, those of the default, ``replayed``, without ``choices``. What has no time left
is left out and said; ends with 1 then. With experts dealt out whole, two H200s took 50 s for either model.

    python -m antiphon.benchmarks.rank_engine --model gpt-oss-20b --layout "TP2 EP2" --out FILE
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from antiphon.benchmarks.engine import prefill_point
from antiphon.benchmarks.engine_decode import DecodeSteps, decode_spread
from antiphon.benchmarks.engine_model import free_memory
from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import (
    BENCH_DECODE,
    BENCH_PREFILL,
    RESULTS,
    Layout,
    Record,
    append_records,
    load_results,
)
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.ranks import RankBench, RankPlan, open_rank_bench, pages_for
from antiphon.model.config import preset

REPLAYED, LAUNCHED = "replayed", "launched"
FUSED = "fused launches"
SPARE_S = 3.0
"""Kept free at the end of the time, so that ranks end in good order."""
SPREAD_CONTEXT = 1024
"""Tokens of context at which a batch's spread over the experts is looked at: it is the tokens' doing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One to take."""

    name: str
    take: Callable[[], Record]


class Steps:
    """Decode steps of all batches of one way, in one engine that is made when the first is wanted."""

    def __init__(
        self, bench: RankBench, options: argparse.Namespace, way: str, spreads: dict[int, float]
    ) -> None:
        self._bench, self._options, self._way, self._spreads = bench, options, way, spreads
        self._steps: DecodeSteps | None = None

    def take(self, batch: int) -> Record:
        """The median step of a batch."""
        options = self._options
        if self._steps is None:
            for each in options.batches:
                if each not in self._spreads:
                    free_memory()
                    look_at = min(options.context, SPREAD_CONTEXT)
                    self._spreads[each] = decode_spread(self._bench, each, look_at)
            free_memory()
            self._steps = DecodeSteps(
                *(self._bench, max(options.batches), options.context, options.steps),
                graphs=self._way == REPLAYED,
            )
        record = self._steps.point(batch, self._spreads[batch])
        if batch == options.batches[-1]:
            self._steps = None  # its pages make room
        return as_measured(record, self._way, options)


def as_measured(record: Record, way: str, options: argparse.Namespace) -> Record:
    """A figure that says where it is of a way that workers take only where they are told to."""
    choices = ([] if way == REPLAYED else [way]) + ([FUSED] if options.fused else [])
    return replace(record, extra=record.extra | {"choices": ", ".join(choices)}) if choices else record


def prompt(bench: RankBench, options: argparse.Namespace, way: str, tokens: int) -> Record:
    """Median time from a prompt to its first token."""
    record = prefill_point(
        *(replace(bench, replays_chunks=way == REPLAYED), tokens, options.chunk, options.repeats),
        enough_s=options.enough_s,
    )
    return as_measured(record, way, options)


def figures(bench: RankBench, options: argparse.Namespace) -> Iterator[Figure]:
    """Prompts, then steps, in one way after the other."""
    for way in options.ways:
        for tokens in options.prompts:
            yield Figure(f"{tokens} tokens, {way}", partial(prompt, bench, options, way, tokens))
    spreads: dict[int, float] = {}
    for way in options.ways:
        steps = Steps(bench, options, way, spreads)
        for batch in options.batches:
            yield Figure(f"batch {batch}, {way}", partial(steps.take, batch))


def points(options: argparse.Namespace) -> list[Point]:
    """What the ranks need pages for."""
    model, layout = options.model, options.layout
    prompts = [Point(BENCH_PREFILL, model, layout, input_tokens=tokens) for tokens in options.prompts]
    context = options.context
    return prompts + [
        Point(BENCH_DECODE, model, layout, batch=batch, context=context) for batch in options.batches
    ]


def peer_beside(record: Record, known: Sequence[Record]) -> Record | None:
    """What another system took for the same over as many GPUs, in another run."""
    place = (record.bench, record.model, record.batch, record.input_tokens, record.context)
    gpus = Layout.parse(record.layout).gpus
    found = [
        each
        for each in known
        if each.peer is not None
        and (each.bench, each.model, each.batch, each.input_tokens, each.context) == place
        and Layout.parse(each.layout).gpus == gpus
    ]
    return min(found, key=lambda each: each.value, default=None)


def finished(record: Record, layout: Layout, road: str, known: Sequence[Record]) -> Record:
    """A figure with its layout, floor, kernels and the peer's figure of another run."""
    floor_s = layout_floor_s(preset(record.model), layout, record.input_tokens, record.batch, record.context)
    record = replace(
        record, layout=layout.name, floor=round(floor_s * 1e3, 4), extra=record.extra | {"ranks": road}
    )
    peer = peer_beside(record, known)
    if peer is None:
        return record
    earlier = {"system": peer.peer, "value": peer.value, "date": peer.date, "layout": peer.layout}
    return replace(record, extra=record.extra | {"peer_in_another_run": earlier})


def said(record: Record) -> str:
    """A figure for people."""
    peer = record.extra.get("peer_in_another_run")
    beside = f", {peer['system']} {peer['value']}" if isinstance(peer, dict) else ""
    return f"{record.value:9.3f} ms, floor {record.floor}{beside}"


def measure(bench: RankBench, options: argparse.Namespace, deadline: float) -> bool:
    """Take every figure for which there is time: as long as the one before it took.

    Returns:
        whether all were taken, and were as they should be.
    """
    known = load_results(RESULTS)
    good, last = True, 0.0
    for figure in figures(bench, options):
        begin = time.monotonic()
        name = f"{options.model} {options.layout.name} {figure.name}"
        if begin + last + SPARE_S > deadline:
            print(f"{name}: no time is left", flush=True)
            good = False
            continue
        free_memory()
        record = finished(figure.take(), options.layout, bench.road, known)
        last = time.monotonic() - begin
        append_records(options.out, [record])
        good = good and record.extra.get("ok") is not False
        print(f"{name}: {said(record)} ({last:.1f} s)", flush=True)
    return good


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _ways(text: str) -> list[str]:
    ways = text.split(",")
    if unknown := set(ways) - {REPLAYED, LAUNCHED}:
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(sorted(unknown))}")
    return ways


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model in one layout."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--layout", type=Layout.parse, default="TP2 EP2", help="such as 'TP2 EP2' or TP2")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ways", type=_ways, default=f"{REPLAYED},{LAUNCHED}")
    parser.add_argument("--prompts", type=_numbers, default="1024,8192,32768")
    parser.add_argument("--batches", type=_numbers, default="1,8,32,128")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens per step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--enough-s", type=float, default=4.0, help="no more prompts once they took so long")
    parser.add_argument("--fused", action="store_true", help="of GPUs, as CudaRankTransformer says")
    parser.add_argument("--seconds", type=float, default=580.0, help="for everything, the start included")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.layout.tp < 2 or options.layout.dp > 1:
        parser.error(f"--layout {options.layout.name}: several ranks of one worker, such as TP2")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    pages = pages_for(preset(options.model), points(options), options.steps, options.chunk)
    plan = RankPlan(options.model, options.layout, options.device, pages, options.fused)
    with open_rank_bench(plan) as bench:
        print(f"{options.model} {options.layout.name}: ready in {time.monotonic() - begin:.1f} s", flush=True)
        return 0 if measure(bench, options, begin + options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
