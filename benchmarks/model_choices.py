"""Every figure of one model in one process: decode steps, then prompts under each way to multiply chunks.

The weights are made once. Figures are kept as they come, those of the defaults in ``engine.json``, others in
``choices.json``; what has no time left is left out and said. Ends with 1 when any was left out or failed.

Run: ``python -m antiphon.benchmarks.model_choices --model gpt-oss-20b --out FOLDER``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from antiphon.benchmarks.engine import in_words, prefill_point
from antiphon.benchmarks.engine_decode import decode_point
from antiphon.benchmarks.engine_model import Bench, free_memory, make_bench, sharing
from antiphon.benchmarks.prefill_chunks import RESIDENT_FP8
from antiphon.benchmarks.records import Record, append_records
from antiphon.model.cuda_roads import ChunkChoices

DEFAULTS, CHOICES = "engine.json", "choices.json"
SPARE_S = 3.0
"""Kept free at the end of the time, so that what was measured is written by then."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute prompts.

    Attributes:
        name: on the command line and in the table.
        resident_fp8: long chunks read FP8 experts that lie beside the 4-bit ones.
        graphs: chunks are replayed.
    """

    name: str
    resident_fp8: bool
    graphs: bool = True
    choices: ChunkChoices = ChunkChoices()  # noqa: RUF009  frozen

    @property
    def words(self) -> str:
        """What is not the default."""
        return in_words(self.choices, chunk_graphs=self.graphs, resident_fp8=self.resident_fp8)


def ways_of(resident: bool) -> tuple[Way, ...]:
    """In the order of what is most needed, for a model that holds FP8 experts as well or does not."""
    ways = [
        Way("default", False),
        Way("projections", False, choices=ChunkChoices(fp8_projections=True)),
        Way("launched", False, graphs=False),
    ]
    if resident:
        ways += [Way("resident", True), Way("resident-128", True, choices=ChunkChoices(expert_tile=128))]
    return tuple(ways)


@dataclass(frozen=True, slots=True)
class Point:
    """One figure to take."""

    name: str
    take: Callable[[], Record]


def under(bench: Bench, way: Way) -> Bench:
    """The same weights in another way.

    Raises:
        ValueError: the model's road has only one.
    """
    if way.choices == ChunkChoices() and way.resident_fp8 == bench.resident_fp8:
        return bench
    return sharing(bench, way.resident_fp8, way.choices)


def points(bench: Bench, options: argparse.Namespace) -> list[Point]:
    """Decode steps, then prompts of every length in one way after the other."""
    found = []
    stepping = under(bench, ways_of(resident=False)[0])
    for context, batch in options.decode:
        take_step = partial(decode_point, stepping, batch, context, options.steps)
        found.append(Point(f"decode, batch {batch}, context {context}", take_step))
    wanted = [way for way in ways_of(bench.resident_fp8) if way.name in options.ways.split(",")]
    for way in wanted:
        for tokens in options.prompts:

            def take(way: Way = way, tokens: int = tokens) -> Record:
                repeats = options.repeats if tokens < 20_000 else max(2, options.repeats // 2)
                return prefill_point(
                    *(under(bench, way), tokens, options.chunk, repeats),
                    chunk_graphs=way.graphs,
                    choices=way.words,
                )

            found.append(Point(f"{tokens} tokens, {way.name}", take))
    return found


def measure(bench: Bench, wanted: Sequence[Point], out: Path, deadline: float) -> bool:
    """Take every figure for which there is time: as long as the one before it took.

    Returns:
        whether all were taken, and were as they should be.
    """
    good, last = True, 0.0
    for point in wanted:
        begin = time.monotonic()
        if begin + last + SPARE_S > deadline:
            print(f"{bench.name} {point.name}: no time is left", flush=True)
            good = False
            continue
        free_memory()
        record = point.take()
        last = time.monotonic() - begin
        append_records(out / (CHOICES if "choices" in record.extra else DEFAULTS), [record])
        good = good and record.extra.get("ok") is not False
        figures = f"{record.value:9.3f} ms, floor {record.floor}"
        print(f"{bench.name} {point.name}: {figures} ({last:.1f} s)", flush=True)
    return good


def _pairs(text: str) -> list[tuple[int, int]]:
    """``8192:1,8;32768:1`` -> contexts and batches."""
    found = []
    for group in filter(None, text.split(";")):
        context, batches = group.split(":")
        found += [(int(context), int(batch)) for batch in batches.split(",")]
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decode", type=_pairs, default="8192:1,8,32,128;32768:1,32")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--prompts", type=_numbers, default="1024,8192,32768")
    parser.add_argument("--ways", default="default,projections,launched,resident,resident-128")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything, the weights included")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    begin = time.monotonic()
    resident = options.device == "cuda" and options.model in RESIDENT_FP8
    bench = make_bench(options.model, torch.device(options.device), resident)
    print(f"{options.model}: weights made in {time.monotonic() - begin:.1f} s", flush=True)
    return 0 if measure(bench, points(bench, options), options.out, deadline) else 1


if __name__ == "__main__":
    sys.exit(main())
