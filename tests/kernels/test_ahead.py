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
from antiphon.model.ahead import WorkerShape, launch_all
from antiphon.model.config import preset
from antiphon.model.parallel.layout import ParallelLayout

names = set()
JITFunction.run = lambda self, *_, **__: names.add(self.fn.__name__)
for ranks, page_size, fp8_kv in ((1, 64, False), (2, 32, False), (2, 64, True), (2, 32, True)):
    names.clear()
    shape = WorkerShape(ParallelLayout(ranks), page_size, max_batch_size=3, fp8_kv=fp8_kv)
    launch_all(preset("gpt-oss-120b"), shape, "cpu")
    print(*sorted(names))
"""

ROUTERS = """
from triton.runtime.jit import JITFunction
from antiphon.model.ahead import WorkerShape, launch_all
from antiphon.model.config import preset
from antiphon.model.parallel.layout import ParallelLayout

found = set()
def launched(self, *_, **options):
    if self.fn.__name__ == "_route":
        found.add((options["PADDED"], options["BLOCK_T"]))
JITFunction.run = launched
for layout in (ParallelLayout(1), ParallelLayout(2, expert_parallel=True), ParallelLayout(2)):
    found.clear()
    launch_all(preset("gpt-oss-120b"), WorkerShape(layout, page_size=64, max_batch_size=1), "cpu")
    print(*sorted(found))
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
    def launched(*files: str) -> set[str]:
        source = "".join((ROOT / "kernels" / name).read_text() for name in files)
        return set(re.findall(r"^ +(_\w+)\[\(", source, re.M))

    alone, with_ranks, fp8, small_fp8 = (set(names.split()) for names in run(tmp_path, EVERY))
    own = ("sampling.py", "router.py", "dense/norm.py", "dense/rope.py")
    own += ("attention/decode.py", "attention/split_parts.py")
    assert alone == launched(*own)
    assert with_ranks == alone - {"_finish"} | launched("attention/prefill.py", "rank_sampling.py")
    assert fp8 == with_ranks - launched("attention/prefill.py") | launched("attention/widen.py")
    assert small_fp8 == with_ranks | launched("attention/widen.py", "attention/decode_fp8.py")
    assert len(alone) >= 9
    assert len(with_ranks) >= 10


FP8_KERNELS = """
import torch
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.dense.rope import rope_and_write
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences

def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

pages = Fp8Pages(zeros(1, 8, head_bytes(64, 64), dtype=torch.uint8), 64, 64)
sequences = PagedSequences(zeros(1, 1), zeros(2), zeros(1) + 1, zeros(1, dtype=torch.int64))
query, sinks = zeros(1, 64, 64, dtype=torch.bfloat16), zeros(64, dtype=torch.float32)
with ahead.compile_only(ahead.triton_folder()) as compiled:
    Fp8DecodeAttention(1, 64, 8, 64, query.device).full(query, pages, sequences, sinks, 0.1, query)
    WidePages().widen(pages, sequences, torch.bfloat16)
    qkv, rotation = zeros(1, 80 * 64, dtype=torch.bfloat16), zeros(1, 32, 2, dtype=torch.float32)
    rope_and_write(qkv, sequences.slot, sequences.slot, rotation, pages, 64, query)
print(*compiled)
"""


def test_the_kernels_of_fp8_pages_compile_for_an_h200(tmp_path: Path) -> None:
    (compiled,) = run(tmp_path, FP8_KERNELS)
    assert compiled.split() == ["_decode_full_fp8", "_merge_splits", "_widen_pages", "_rope_and_write"]


def test_padding_is_routed_in_every_layout(tmp_path: Path) -> None:
    """As ``HopperExpertLayers`` and ``HopperRankExperts`` do."""
    assert set(run(tmp_path, ROUTERS)) == {"(False, 16) (False, 32) (True, 16) (True, 32)"}


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


LOADED = """
import importlib.util, sys
from importlib.machinery import ExtensionFileLoader

loader = ExtensionFileLoader("cuda_utils", sys.argv[1])
loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader("cuda_utils", loader)))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_module_that_launches_brings_the_driver_s_library_along(tmp_path: Path) -> None:
    """Otherwise it only loads where another library has done so, and Triton compiles it again: not without a
    compiler. A stand-in has what the module calls."""
    (module,) = run(tmp_path, "print(ahead.build_driver_module(ahead.triton_folder()))")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True
    )
    called = re.findall(r"U (cu[A-Z]\w+)", symbols.stdout)
    assert len(called) > 10
    source, library = tmp_path / "stand_in.c", tmp_path / "libcuda.so.1"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in called))
    subprocess.run(
        ["gcc", "-shared", str(source), "-Wl,-soname,libcuda.so.1", "-o", str(library)], check=True
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, module], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


KEPT = """
import hashlib
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime.build import platform_key

target = ahead.triton_folder()
source = Path(driver.__file__).with_name("driver.c").read_text()
ahead.build_driver_module(target)
for linkage in ("ELF", ""):
    key = ",".join((*platform_key().split(",")[:-1], linkage))
    ahead.knobs.cache.dir = str(target)
    print(ahead.get_cache_manager(hashlib.sha256((source + key).encode()).hexdigest()).get_file(
        "cuda_utils" + ahead.sysconfig.get_config_var("EXT_SUFFIX")))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_module_that_launches_is_found_where_python_knows_less_of_the_platform(tmp_path: Path) -> None:
    """Triton's name of the platform depends on whether the program ``file`` is installed."""
    places = run(tmp_path, KEPT)
    assert len(set(places)) == 2
    assert "None" not in places
    assert len({Path(place).read_bytes() for place in places}) == 1


MISSING = """
build(32)
import triton
from antiphon.model import ahead as worker
from antiphon.model.config import preset
from antiphon.model.parallel.layout import ParallelLayout

triton.runtime.driver.set_active(ahead._NoDevice())
worker.hopper_obstacle = lambda *_: None
libraries, worker.libraries = worker.libraries, lambda _: ()
shape = worker.WorkerShape(ParallelLayout(2), page_size=64, max_batch_size=2)
def refused():
    try:
        worker.require_built(preset("gpt-oss-20b"), shape, "cpu")
    except KernelLibraryError as error:
        print(error)
refused()
worker.libraries = libraries
refused()
"""


def test_a_worker_that_lacks_kernels_of_its_layout_names_them(tmp_path: Path) -> None:
    compiled, triton, cuda = run(tmp_path, MISSING)
    assert compiled == "_rms_norm _route"
    assert triton.startswith(f"Triton kernels of {tmp_path / 'triton'} that were not built: ")
    assert "_rms_norm[H=2880, BLOCK=4096, ADD=True, PDL=False]" in triton
    assert "ADD=False" not in triton, "what was built is not missing"
    assert re.search(r"_rope_and_write\[Q=32, G=4, PAGE=64, DIM=64, HEAD_BLOCK=64, FP8=False\]", triton)
    assert re.search(r" and \d+ more; run `antiphon kernels build --layouts \"TP2\" --page-size 64 ", triton)
    assert re.match(r"CUDA libraries that were not built: prefill_attention-[0-9a-f]{16}\.so, moe-", cuda)


def test_which_libraries_a_layout_needs() -> None:
    code = (
        "from antiphon.model.ahead import WorkerShape, libraries\n"
        "from antiphon.model.parallel.layout import ParallelLayout\n"
        "for layout in (ParallelLayout(1), ParallelLayout(4), ParallelLayout(4, expert_parallel=True)):\n"
        "    print(*(library.name for library in libraries(WorkerShape(layout, 64, 1))))\n"
        "for ranks in (1, 2):\n"
        "    shape = WorkerShape(ParallelLayout(ranks), 64, 1, fp8_kv=True)\n"
        "    print(*(library.name for library in libraries(shape)))\n"
    )
    assert run(Path("/nowhere"), code) == [
        "skinny moe prefill_attention page_copy ipc",
        "prefill_attention moe moe_split peer_reduce page_copy ipc",
        "prefill_attention moe peer_reduce page_copy ipc",
        "skinny moe prefill_attention page_copy ipc fp8_attention",
        "prefill_attention moe moe_split peer_reduce page_copy ipc fp8_attention",
    ]


def test_layouts_are_read_as_they_are_written() -> None:
    code = (
        "from antiphon.cluster.cli_kernels import parse_layout\n"
        "from antiphon.protocol.errors import ConfigError\n"
        "print(*(parse_layout(text).name for text in ('TP1', ' EP4 TP4')), sep='|')\n"
        "for text in ('EP2 TP4', 'TP', '4'):\n"
        "    try:\n"
        "        parse_layout(text)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    names, *refused = run(Path("/nowhere"), code)
    assert names == "TP1|EP4 TP4"
    assert len(refused) == 3
    assert all("expected such as TP1, TP4 or EP4 TP4" in line for line in refused)
