"""A prefill and a decode worker on two GPUs, without Ray and HTTP: what a split costs and what it spares.

The workers are the real ones with random weights, each in a process with a GPU of its own; a stand-in for the
router in this process hands requests in and notes when tokens come back. Measured: time to first token of a
prompt against one GPU that does both parts, and the time between tokens of running streams while prompts
arrive.

    python -m antiphon.benchmarks.worker_pair --model gpt-oss-20b --out results.json
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from pathlib import Path

from antiphon.benchmarks.pair_processes import StandInRouter, running, until
from antiphon.benchmarks.records import Record, append_records, checkout_commit, now
from antiphon.benchmarks.split.run import device_name

LANDING_S = 0.015
"""Before a prompt's first token, the longest time in which its KV comes and its first step runs."""


class Prompts:
    """Random token ids, so that no two prompts share a beginning."""

    def __init__(self, vocabulary: int = 199_000) -> None:
        self._random = random.Random(3)
        self._vocabulary = vocabulary

    def of(self, tokens: int) -> list[int]:
        """A new prompt."""
        return self._random.choices(range(self._vocabulary), k=tokens)


def first_tokens(router: StandInRouter, prompts: Prompts, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds to the first and to the second token of a lone prompt, medians; tail of its transfer."""
    firsts, seconds, tails = [], [], []
    for _ in range(repeats + 1):
        stream = router.generate(prompts.of(tokens), 4)
        router.wait([stream], 60)
        firsts.append((stream.times[0] - stream.sent) * 1e3)
        seconds.append((stream.times[1] - stream.sent) * 1e3)
        if router.finished:
            tails.append(router.finished[-1].transfer_tail_s * 1e3)
    found = {"ttft_ms": statistics.median(firsts[1:]), "second_token_ms": statistics.median(seconds[1:])}
    return found | ({"transfer_tail_ms": statistics.median(tails[1:])} if tails else {})


def interference(
    router: StandInRouter, prompts: Prompts, streams: int, tokens: int, every_s: float, seconds: float
) -> dict[str, float]:
    """Milliseconds between tokens of running streams while a prompt arrives every so often.

    ``itl_p99_streams_alone_ms`` leaves out what overlaps the coming of a prompt's KV, and its answer, which
    is decoded beside the streams. On one GPU that does both parts it has the steps that computed a prompt
    more than ``LANDING_S`` before its first token.
    """
    longest = int(seconds / 0.004)
    running_streams = [router.generate(prompts.of(tokens), longest) for _ in range(streams)]
    # Made now: whoever makes thousands of numbers keeps the thread waiting that takes the time of tokens.
    coming = [prompts.of(tokens) for _ in range(math.ceil(seconds / every_s))]
    until(lambda: all(stream.tokens > 4 for stream in running_streams) or bool(router.trouble), "streams")
    begin = time.perf_counter()
    arrivals = []
    for prompt in coming:
        arrivals.append(router.generate(prompt, 4))
        time.sleep(every_s)
    end = time.perf_counter()
    if router.trouble:
        raise RuntimeError("; ".join(router.trouble))
    spans = [
        (earlier, later)
        for stream in running_streams
        for earlier, later in itertools.pairwise([at for at in stream.times if begin <= at <= end])
    ]
    gaps = sorted((later - earlier) * 1e3 for earlier, later in spans)
    until(lambda: all(stream.times for stream in arrivals) or bool(router.trouble), "the prompts' answers")
    answers = [(stream.times[0], stream.times[-1]) for stream in arrivals if stream.times]
    alone = sorted(
        (later - earlier) * 1e3
        for earlier, later in spans
        if not any(earlier < last and later > first - LANDING_S for first, last in answers)
    )
    waits = [(stream.times[0] - stream.sent) * 1e3 for stream in arrivals if stream.times]
    return {
        "itl_p50_ms": gaps[len(gaps) // 2],
        "itl_p99_ms": gaps[int(len(gaps) * 0.99)],
        "itl_max_ms": gaps[-1],
        **({"itl_p99_streams_alone_ms": alone[int(len(alone) * 0.99)]} if alone else {}),
        "arrivals_ttft_p50_ms": statistics.median(waits),
        "arrivals": len(arrivals),
        "tokens_per_s": len(gaps) / (end - begin),
    }


def main() -> None:
    """Measure the split, then one GPU that does both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lengths = [int(tokens) for tokens in options.tokens.split(",")]
    longest = max(*lengths, options.context) + 4096
    device = device_name(options.device == "cuda")
    for colocated in (False, True):
        records: list[Record] = []
        where = "1 GPU" if colocated else "prefill TP1 + decode TP1"

        def note(
            bench: str,
            tokens: int,
            value: float,
            extra: dict[str, object],
            where: str = where,
            records: list[Record] = records,
        ) -> None:
            print(f"{bench}, {where}, {tokens} tokens: {value:.2f} ms {extra}", flush=True)
            stamp = "TP1", device, checkout_commit(), now()
            record = Record(
                bench,
                options.model,
                *stamp,
                value,
                "ms",
                input_tokens=tokens,
                extra={**extra, "shape": where},
            )
            records.append(record)

        with running(options.model, options.device, colocated, longest, options.streams + 8) as router:
            prompts = Prompts()
            for tokens in lengths:
                found = first_tokens(router, prompts, tokens, options.repeats)
                note("ttft", tokens, found.pop("ttft_ms"), dict(found))
            if options.streams:
                shape = options.streams, options.context, 0.5, options.seconds
                found = interference(router, prompts, *shape)
                note("interference", options.context, found.pop("itl_p99_ms"), dict(found))
        if options.out:
            append_records(options.out, records)


if __name__ == "__main__":
    main()
