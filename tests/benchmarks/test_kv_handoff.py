"""Hand-offs are measured without GPUs too, through NIXL between two processes; what arrives is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("slots", [0, 2], ids=["pages directly", "staged"])
def test_pages_arrive_and_every_rate_is_recorded(slots: int, tmp_path: Path) -> None:
    out = tmp_path / "transfer.json"
    shape = ("--device", "cpu", "--model", "tiny", "--tokens", "1024", "--chunk-tokens", "512")
    few = ("--layer-groups", "2", "--repeats", "1", "--slots", str(slots), "--slot-mib", "1")
    subprocess.run(
        [sys.executable, "-m", "antiphon.benchmarks.kv_handoff", *shape, *few, "--out", str(out)],
        check=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (record,) = json.loads(out.read_text())
    assert (record["bench"], record["input_tokens"], record["staging_slots"]) == ("transfer", 1024, slots)
    assert record["value"] > 0
    assert record["floor"] > 0
    assert record["limit"] > 0
    assert (record["median_descriptor_bytes"] > 200_000) is bool(slots)
