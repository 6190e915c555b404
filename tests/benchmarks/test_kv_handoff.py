"""Hand-offs are measured without GPUs too, through NIXL between two processes; what arrives is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.benchmarks.kv_sender import pace
from antiphon.protocol.rank_messages import StepMark


@pytest.mark.parametrize("way", ["pages", "staged"])
def test_pages_arrive_and_every_rate_is_recorded(way: str, tmp_path: Path) -> None:
    out = tmp_path / "transfer.json"
    shape = ("--device", "cpu", "--model", "tiny", "--tokens", "1024", "--chunk-tokens", "512")
    paced = ("--compute-ms", "1024:20", "--out", str(out))
    few = ("--layer-groups", "2", "--repeats", "1", "--way", way, "--slots", "2", "--slot-mib", "1")
    subprocess.run(
        [sys.executable, "-m", "antiphon.benchmarks.kv_handoff", *shape, *few, *paced],
        check=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (record,) = json.loads(out.read_text())
    assert (record["bench"], record["input_tokens"], record["way"]) == ("transfer", 1024, way)
    assert record["kernel"] == ("slots of 1 MiB" if way == "staged" else "pages by NIXL")
    assert record.get("staging_slots") == (2 if way == "staged" else None)
    assert record["tail_ms"] > 0
    assert record["value"] > 0
    assert record["floor"] > 0
    assert record["limit"] > 0
    assert (record["median_descriptor_bytes"] > 200_000) is (way == "staged")


def test_only_gpus_map_pages() -> None:
    mapped = ("--device", "cpu", "--way", "mapped")
    ended = subprocess.run(
        [sys.executable, "-m", "antiphon.benchmarks.kv_handoff", *mapped],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 2
    assert "only GPUs map the pages of another process" in ended.stderr


def test_a_layer_group_becomes_ready_after_as_long_as_its_layers_take() -> None:
    marks = [StepMark(step, group) for step in (1, 2) for group in range(4)]
    assert pace(marks, (5, 13, 21, 23), 0.48) == pytest.approx([0.06, 0.08, 0.08, 0.02] * 2)
