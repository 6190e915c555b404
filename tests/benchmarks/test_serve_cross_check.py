"""The comparison with AIPerf, whose stand-in writes an export of known figures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.serve_cross_check import CrossCheckFailed, differences, main

STAND_IN = """#!/bin/sh
[ "$1" = --version ] && echo 9.9 && exit 0
for last; do :; done
mkdir -p "$last/run"
echo '{EXPORT}' > "$last/run/profile_export_aiperf.json"
"""


def export(ttft: float) -> dict[str, Any]:
    def row(value: float) -> dict[str, float]:
        return {"avg": value, "p50": value, "p90": value, "p99": value}

    return {
        "time_to_first_token": row(ttft),
        "inter_token_latency": row(20.0),
        "request_latency": row(ttft + 100.0),
        "output_token_throughput": {"avg": 50.0},
    }


def aiperf(folder: Path, text: str) -> str:
    program = folder / "aiperf"
    program.write_text(STAND_IN.replace("{EXPORT}", text))
    program.chmod(0o755)
    return str(program)


async def test_both_are_run_and_compared(script: Any, tmp_path: Path) -> None:
    server = await script(first_s=0.05, gap_s=0.02, token_ids=False)
    output = tmp_path / "check.json"
    arguments = ["--url", server.url, "--model", "scripted", "--rate", "10", "--requests", "6"]
    arguments += ["--output-tokens", "6", "--output", str(output)]
    far = aiperf(tmp_path, json.dumps(export(500_000.0)))
    assert await asyncio.to_thread(main, [*arguments, "--aiperf", far]) == 1
    document = json.loads(output.read_text())
    assert document["aiperf"]["version"] == "9.9"
    assert document["aiperf"]["ttft_ms"]["p50"] == 500_000.0
    assert 45 < document["antiphon"]["ttft_ms"]["p50"] < 450_000
    assert document["ours_over_theirs_less_one"]["ttft_ms p50"] < -0.05
    broken = aiperf(tmp_path, "{}")
    with pytest.raises(CrossCheckFailed, match="time_to_first_token"):
        await asyncio.to_thread(main, [*arguments, "--aiperf", broken])


def test_differences_by_hand() -> None:
    def figures(scale: float) -> dict[str, Any]:
        times = {name: {"mean": 10.0 * scale, "p50": 8.0 * scale} for name in ("ttft_ms", "itl_ms", "e2e_ms")}
        return times | {"output_tokens_per_s": 100.0 / scale}

    found = differences(figures(1.0), figures(1.25))
    assert found["ttft_ms mean"] == pytest.approx(0.25)
    assert found["output_tokens_per_s"] == pytest.approx(-0.2)
