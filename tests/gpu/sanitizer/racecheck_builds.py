"""What racecheck watches instead of the libraries that workers load, and how it is itself checked.

It takes an arrival at an mbarrier to order the accesses of the arriving thread alone, whatever barrier of a
warp or of a block came before: so it calls every warp a race in which one lane speaks for all (2025.3 and
2026.4 do). It is therefore given libraries in which every lane arrives itself. That one lane does speak for
all is what ``tests/kernels/test_races_on_host.py`` looks at, thread by thread.

After ten million races in one process it says nothing of further ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_int, c_void_p
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from sanitizer_cases import Machine

from antiphon.cluster.cli_kernels import WATCHED
from antiphon.kernels.cuda_library import CudaLibrary, KernelLibraryError, check_launch

_HERE = Path(__file__).parent
CANARY = CudaLibrary(
    "canary", (_HERE / "canary.cu",), headers=(_HERE.parents[2] / "kernels/moe/csrc/hopper.cuh",)
)


def build() -> str:
    """Compile what is not there; returns what is in the way, nothing if all is there."""
    try:
        for library in (*(library.for_racecheck() for library in WATCHED), CANARY):
            if library.find() is None:
                library.build()
    except KernelLibraryError as error:
        return str(error)
    return ""


@contextmanager
def loaded() -> Iterator[None]:
    """Within, libraries are loaded in the form for racecheck."""
    load = CudaLibrary.load

    def load_watched(library: CudaLibrary) -> CDLL:
        return load(library.for_racecheck() if library in WATCHED else library)

    with mock.patch.object(CudaLibrary, "load", load_watched):
        yield


def _run_canary(ordered: bool, machine: Machine) -> None:
    canary = CANARY.load().antiphon_canary
    canary.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
    source, sums = machine.random(64, dtype=torch.float32), machine.random(32, dtype=torch.float32)
    stream = torch.cuda.current_stream().cuda_stream
    check_launch(canary(source.data_ptr(), sums.data_ptr(), int(ordered), stream), "canary")


CANARIES = {"copies_in_order": partial(_run_canary, True), "copies_out_of_order": partial(_run_canary, False)}
"""A kernel whose bulk copies wait for those that read, or do not: racecheck must say nothing of the first
launch, and something of the second."""
