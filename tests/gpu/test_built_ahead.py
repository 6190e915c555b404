"""Kernels compiled where there may be no GPU are those that a worker launches, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
        reason="Triton before 3.7 compiles what launches a kernel when it is launched first",
    ),
]
SHAPE = """
from antiphon.model import ahead
from antiphon.model.config import preset
from antiphon.model.parallel.layout import ParallelLayout

config = preset("gpt-oss-20b")
shape = ahead.WorkerShape(ParallelLayout({layout}), page_size={page_size}, max_batch_size=2, fp8_kv={fp8_kv})
"""
BUILD = """
from antiphon.kernels.ahead import build_driver_module, compile_only, triton_folder

build_driver_module(triton_folder())
with compile_only(triton_folder()) as compiled:
    ahead.launch_all(config, shape, "cpu")
print(len(compiled))
"""
RUN = """
import torch

ahead.libraries = lambda _: ()  # Triton's kernels alone
ahead.require_built(config, shape, "cuda")
ahead.launch_all(config, shape, "cuda")
torch.cuda.synchronize()
print("ran")
"""


def run(folder: Path, code: str, path: str) -> str:
    environment = {**os.environ, "ANTIPHON_KERNEL_LIBRARY_DIR": str(folder), "PATH": path}
    for compiler in ("CC", "TRITON_CACHE_DIR"):
        environment.pop(compiler, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("layout", "page_size", "fp8_kv"),
    [("1", 64, False), ("2", 32, True), ("2, expert_parallel=True", 64, False)],
    ids=["TP1", "TP2", "EP2"],
)
def test_a_worker_without_a_compiler_runs_what_was_built(
    layout: str, page_size: int, fp8_kv: bool, tmp_path: Path
) -> None:
    shape = SHAPE.format(layout=layout, page_size=page_size, fp8_kv=fp8_kv)
    assert int(run(tmp_path, shape + BUILD, os.environ["PATH"])) > 10
    assert run(tmp_path, shape + RUN, "/nonexistent") == "ran"
