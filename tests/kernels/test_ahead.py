"""Triton kernels compiled ahead, without a GPU: in processes of their own, without the interpreter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = """
import torch
from antiphon.kernels import ahead
from antiphon.kernels.cuda_library import KernelLibraryError
from antiphon.kernels.dense.norm import rms_norm
from antiphon.kernels.router import route

def launch(tokens):
    x = torch.empty(tokens, 2880, dtype=torch.bfloat16)
    rms_norm(x, torch.empty(2880, dtype=torch.bfloat16), 1e-5)
    route(x, torch.empty(32, 2880, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16), 4)

def build(tokens):
    with ahead.compile_only(ahead.triton_folder()) as compiled:
        launch(tokens)
    print(*compiled)
"""
REFUSE = """
ahead.load_only()
import triton
triton.runtime.driver.set_active(ahead._NoDevice())
with ahead.without_launches():
    launch(32)
    print("found")
    try:
        launch(4096)
    except KernelLibraryError as error:
        print("refused:", error)
"""


EVERY = """
from triton.runtime.jit import JITFunction
from antiphon.model.ahead import launch_all
from antiphon.model.config import preset

names = set()
JITFunction.run = lambda self, *_, **__: names.add(self.fn.__name__)
launch_all(preset("gpt-oss-120b"), "cpu", page_size=64, max_batch_size=3)
print(*sorted(names))
"""


def run(folder: Path, code: str) -> list[str]:
    environment = {**os.environ, "ANTIPHON_KERNEL_LIBRARY_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH + code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_worker_loads_what_was_built_and_refuses_the_rest(tmp_path: Path) -> None:
    # Another number of tokens is no other kernel, until it is routed in larger blocks.
    assert run(tmp_path, "build(32); build(47)") == ["_rms_norm _route", ""]
    found, refused = run(tmp_path, REFUSE)
    assert found == "found"
    assert refused.startswith("refused: a Triton kernel is not in")


def test_every_kernel_of_the_fast_model_is_launched(tmp_path: Path) -> None:
    files = [
        ROOT / "kernels" / name for name in ("sampling.py", "router.py", "dense/norm.py", "dense/rope.py")
    ]
    files.append(ROOT / "kernels" / "attention" / "decode.py")
    source = "".join(path.read_text() for path in files)
    launched = set(re.findall(r"^ +(_\w+)\[\(", source, re.M))
    (names,) = run(tmp_path, EVERY)
    assert set(names.split()) == launched
    assert len(launched) >= 9


def test_a_folder_that_was_never_built_is_refused(tmp_path: Path) -> None:
    code = "try:\n    ahead.load_only()\nexcept KernelLibraryError as error:\n    print(error)"
    (message,) = run(tmp_path, code)
    assert "run `antiphon kernels build`" in message


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_module_that_launches_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    first, again = run(tmp_path, "print(ahead.build_driver_module(ahead.triton_folder()))\n" * 2)
    assert first == again
    assert Path(first).is_relative_to(tmp_path / "triton")
    assert Path(first).stat().st_size > 10_000
