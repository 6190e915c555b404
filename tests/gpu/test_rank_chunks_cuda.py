"""Chunks of prompts that two ranks replay, on two GPUs: the same as launched ones on either."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "chunk_rank.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    ("model", "groups", "role", "launches"),
    [
        ("gpt-oss-tiny", 1, "samples", "single"),
        ("gpt-oss-20b", 2, "samples", "single"),
        ("gpt-oss-20b", 2, "ships", "single"),
        ("gpt-oss-120b", 2, "ships", "single"),
        ("gpt-oss-20b", 2, "samples", "fused"),
        ("gpt-oss-120b", 2, "ships", "fused"),
    ],
)
def test_replayed_chunks_over_two_ranks_equal_launched_ones(
    model: str, groups: int, role: str, launches: str
) -> None:
    """Four layers of the published shapes; the demo model, which is trained, also says what one GPU says."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(port), model, str(groups), role, launches],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, text in enumerate(said):
        assert f"rank {rank}: replayed chunks are the launched ones" in text, text
