"""Two GPUs as two ranks: sums over peer memory, and an engine whose graphs both replay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def records_of(part: str, out: Path) -> list[dict[str, object]]:
    """What one part of the measurement wrote; its ranks are processes, as peer memory needs."""
    command = [sys.executable, "-m", "antiphon.benchmarks.rank_steps", "--parts", part, "--out", str(out)]
    subprocess.run(command, check=True, timeout=280)
    found: list[dict[str, object]] = json.loads(out.read_text())
    return found


def test_a_sum_in_one_launch_is_the_librarys_bit_for_bit(tmp_path: Path) -> None:
    """In one shot and in two, for 1 to 8,192 rows."""
    every = records_of("sums", tmp_path / "sums.json")
    records = [record for record in every if str(record["kernel"]).startswith("peer memory")]
    assert len(records) > 20
    assert {record["equal_share"] for record in records} == {1.0}
    assert all(float(str(record["largest_difference"])) < 0.1 for record in records)


def test_graphs_of_two_ranks_say_what_one_gpu_says(tmp_path: Path) -> None:
    over_ranks = records_of("texts", tmp_path / "texts.json")[-1]
    equal, tokens = over_ranks["equal_tokens_of"]  # type: ignore[misc]
    assert equal > 0.5 * tokens, "random weights have near ties, after which texts part"
