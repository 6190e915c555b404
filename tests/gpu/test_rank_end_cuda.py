"""A rank whose first rank was killed within a step gives its GPU back, whatever its kernels wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from antiphon.cluster.lifeline import EXIT_STATUS
from antiphon.cluster.resolution import locate

SCRIPT = Path(__file__).parents[1] / "cluster" / "worker_rank.py"
NOISE_BYTES = 256 << 20
"""What this process itself takes on the GPU meanwhile."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_a_killed_leader_frees_the_other_gpu() -> None:
    checkpoint = locate("gpt-oss-tiny", None)
    free_before, _ = torch.cuda.mem_get_info(1)
    options = (f"--checkpoint={checkpoint}", "--lease-s=3", "--device=cuda")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), f"--rank={rank}", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    leader, follower = ranks
    try:
        assert leader.stdout is not None
        assert follower.stdin is not None
        assert follower.stdout is not None
        follower.stdin.write(leader.stdout.readline().removeprefix("meet at "))
        follower.stdin.flush()
        assert leader.stdout.readline() == "computing\n"
        follower.stdin.write("is it there?\n")
        follower.stdin.flush()
        assert follower.stdout.readline() == "asked\n"
        time.sleep(0.5)  # as many steps as fit are under way
        os.kill(leader.pid, signal.SIGKILL)
        assert follower.wait(30) in (EXIT_STATUS, -signal.SIGALRM)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert torch.cuda.mem_get_info(1)[0] > free_before - NOISE_BYTES
