"""KV from one process' pages into another's by the sender's GPU, through the objects that workers use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("devices", [1, 2], ids=["on one GPU", "between two GPUs"])
def test_pages_arrive_as_they_were_sent(devices: int, tmp_path: Path) -> None:
    """Each hand-off is checked by the program itself, launched at once and behind work of the GPU."""
    pytest.importorskip("nixl", reason="the transport of notifications")
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    out = tmp_path / "transfer.json"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:devices]
    shape = ("--model", "gpt-oss-20b", "--tokens", "1000,8192", "--chunk-tokens", "2048", "--repeats", "2")
    way = ("--way", "mapped", "--blocks", "4,32", "--compute-ms", "1000:10,8192:80", "--out", str(out))
    subprocess.run(
        [sys.executable, "-m", "antiphon.benchmarks.kv_handoff", *shape, *way],
        check=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)},
    )
    records = json.loads(out.read_text())
    assert [(record["way"], record["blocks"]) for record in records] == [("mapped", 4)] * 2 + [
        ("mapped", 32)
    ] * 2
    assert all(record["tail_ms"] >= 0 for record in records)
