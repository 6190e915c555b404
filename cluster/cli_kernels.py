"""``antiphon kernels``: CUDA libraries and Triton kernels, compiled ahead of time."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from antiphon.kernels import page_copy
from antiphon.kernels.attention import fp8_hopper, prefill_hopper
from antiphon.kernels.collectives import peer_reduce
from antiphon.kernels.cuda_library import CudaLibrary, KernelLibraryError
from antiphon.kernels.dense import skinny
from antiphon.kernels.ipc.library import LIBRARY as IPC_LIBRARY
from antiphon.kernels.moe import build as moe
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.protocol.errors import AntiphonError, ConfigError

LIBRARIES: tuple[CudaLibrary, ...] = (
    skinny.LIBRARY,
    moe.LIBRARY,
    moe.SPLIT_LIBRARY,
    prefill_hopper.LIBRARY,
    fp8_hopper.LIBRARY,
    peer_reduce.LIBRARY,
    page_copy.LIBRARY,
    IPC_LIBRARY,
)
"""Every library that a worker on an H200 loads."""
WATCHED: tuple[CudaLibrary, ...] = (skinny.LIBRARY, moe.LIBRARY, moe.SPLIT_LIBRARY)
"""Of these the ones that racecheck watches in a form of their own."""


def build_kernels(
    folder: Path | None, models: Sequence[str], layouts: Sequence[str], page_size: int, max_batch_size: int
) -> None:
    """Build what is missing; prints each library's path and how many Triton kernels were compiled.

    Args:
        folder: where workers will look (their ANTIPHON_KERNEL_LIBRARY_DIR); that variable's when None.
        models: presets whose Triton kernels are compiled; none to leave those to the workers.
        layouts: of workers that they are compiled for, such as ``TP1`` or ``EP4 TP4``; those of split
            experts only where some layout splits them.

    Raises:
        AntiphonError: no nvcc or C compiler, or it failed; no such preset; or no layout, or none of a model.
    """
    spread = [parse_layout(layout) for layout in layouts]
    if folder is not None:
        os.environ["ANTIPHON_KERNEL_LIBRARY_DIR"] = str(folder.resolve())
    try:
        splits = any(layout.tensor_parallel > 1 and not layout.expert_parallel for layout in spread)
        for library in LIBRARIES:
            if library is not moe.SPLIT_LIBRARY or splits:
                print(library.build())
        if models:
            _build_triton(models, spread, page_size, max_batch_size)
    except KernelLibraryError as error:
        raise AntiphonError(str(error)) from error


def parse_layout(text: str) -> ParallelLayout:
    """``TP4`` or ``EP4 TP4``.

    Raises:
        ConfigError: another text.
    """
    found = re.fullmatch(r"(?:EP(\d+) )?TP(\d+)", text.strip())
    if found is None or found[1] not in (None, found[2]):
        raise ConfigError(f"layout {text!r}: expected such as TP1, TP4 or EP4 TP4")
    return ParallelLayout(int(found[2]), found[1] is not None)


def _build_triton(
    models: Sequence[str], layouts: Sequence[ParallelLayout], page_size: int, max_batch_size: int
) -> None:
    from antiphon.kernels.ahead import build_driver_module, compile_only, triton_folder
    from antiphon.model.ahead import WorkerShape, launch_all
    from antiphon.model.config import preset

    target = triton_folder()
    print(build_driver_module(target))
    with compile_only(target) as compiled:
        for model in models:
            for layout in layouts:
                before = len(compiled)
                # With FP8 pages or without: which it is, is the deployment's choice, and both are few.
                for fp8_kv in (False, True):
                    shape = WorkerShape(layout, page_size, max_batch_size, fp8_kv=fp8_kv)
                    launch_all(preset(model), shape, "cpu")
                print(f"{target}: {len(compiled) - before} kernels for {model}, {layout.name}", flush=True)
