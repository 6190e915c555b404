"""Puts AIPerf and our own load generator on one server, one after the other, and compares their figures.

    python -m antiphon.benchmarks.serve_cross_check --url http://127.0.0.1:8000 --model M --aiperf /opt/aiperf

AIPerf is a program of an environment of its own. Both send chat requests at a constant rate with answers of
the same length, to a server whose latencies do not depend on the prompt's text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from antiphon.benchmarks.records import RESULTS, checkout_commit, now, this_machine, write_json
from antiphon.benchmarks.serve.command import Options, measure
from antiphon.protocol.errors import AntiphonError

AGREE_WITHIN = 0.05
COMPARED = ("mean", "p50")
"""Of TTFT, ITL and E2E; the 99th percentile of some dozens of requests is one request."""
EXPORT = "profile_export_aiperf.json"
_THEIR_NAMES = {
    "ttft_ms": "time_to_first_token",
    "itl_ms": "inter_token_latency",
    "e2e_ms": "request_latency",
}
Figures = dict[str, Any]


class CrossCheckFailed(AntiphonError):
    """AIPerf could not run; the message is the end of what it wrote."""


def by_aiperf(options: argparse.Namespace) -> Figures:
    """AIPerf's figures.

    Raises:
        CrossCheckFailed: it ended with an error, or its export is not what is known of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(options.aiperf, "profile", "--model", options.model, "--url", options.url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", "builtin", "--ui", "none"),
            *("--request-rate", str(options.rate), "--arrival-pattern", "constant"),
            *("--request-count", str(options.requests), "--random-seed", "1"),
            *("--isl", str(options.input_tokens), "--osl", str(options.output_tokens)),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(folder).rglob(EXPORT))
        if done.returncode or not found:
            raise CrossCheckFailed(f"{options.aiperf}: {(done.stdout + done.stderr)[-2000:]}")
        document = json.loads(found[0].read_text())
    try:
        figures: Figures = {
            ours: {"mean": document[theirs]["avg"], **{q: document[theirs][q] for q in ("p50", "p90", "p99")}}
            for ours, theirs in _THEIR_NAMES.items()
        }
        return figures | {"output_tokens_per_s": document["output_token_throughput"]["avg"]}
    except KeyError as error:
        raise CrossCheckFailed(f"{EXPORT}: no {error}") from error


def by_us(options: argparse.Namespace) -> Figures:
    """Our figures of the same load."""
    _, document = uvloop.run(
        measure(
            Options(
                url=options.url,
                model=options.model,
                endpoint="chat",
                rate_per_s=options.rate,
                arrivals="constant",
                requests=options.requests,
                input_tokens=str(options.input_tokens),
                output_tokens=str(options.output_tokens),
            )
        )
    )
    latency = document["latency_s"]
    figures: Figures = {
        f"{name}_ms": {q: latency[name][q] * 1e3 for q in ("mean", "p50", "p90", "p99")}
        for name in ("ttft", "itl", "e2e")
    }
    return figures | {"output_tokens_per_s": document["rates"]["output_tokens_per_s"]}


def differences(theirs: Figures, ours: Figures) -> dict[str, float]:
    """Ours over theirs less one, of everything that is compared."""
    found = {
        f"{name} {quantile}": ours[name][quantile] / theirs[name][quantile] - 1
        for name in _THEIR_NAMES
        for quantile in COMPARED
    }
    name = "output_tokens_per_s"
    return found | {name: ours[name] / theirs[name] - 1}


def main(arguments: list[str] | None = None) -> int:
    """Run both, keep the figures; 1 when they differ by more than the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--server", default="", help="What it is, for the record.")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--input-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULTS / "serve_cross_check.json")
    options = parser.parse_args(arguments)
    theirs, ours = by_aiperf(options), by_us(options)
    found = differences(theirs, ours)
    for name, share in found.items():
        print(f"{name:22} {share:+.1%}")
    version = subprocess.run([options.aiperf, "--version"], capture_output=True, text=True, check=False)
    load = {"arrivals": "constant", "requests_per_s": options.rate, "requests": options.requests}
    document = {
        "bench": "serve_cross_check",
        "commit": checkout_commit(),
        "date": now(),
        "machine": this_machine(),
        "server": options.server or options.url,
        "load": load,
        "aiperf": {"version": version.stdout.strip(), **theirs},
        "antiphon": ours,
        "ours_over_theirs_less_one": found,
    }
    write_json(options.output, document)
    return int(any(abs(share) > AGREE_WITHIN for share in found.values()))


if __name__ == "__main__":
    sys.exit(main())
