"""Memory of another process' GPU: sums over it, launched, replayed, repeated, whatever each process sees."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "peer_rank.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("sees_all", [True, False], ids=["each sees both GPUs", "each sees its own"])
def test_two_processes_sum_over_each_others_memory(sees_all: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    both = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ranks = []
    for rank in range(2):
        visible = ",".join(both[:2]) if sees_all else both[rank]
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), "2", str(port)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, text in enumerate(said):
        where = f"cuda:{rank} of 2" if sees_all else "cuda:0 of 1"
        assert f"rank {rank} on {where}: sums are right, memory is closed" in text, text
