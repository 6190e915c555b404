"""``antiphon kernels``: CUDA libraries, compiled ahead of time."""

from __future__ import annotations

from antiphon.kernels.attention import prefill_hopper
from antiphon.kernels.collectives import one_shot
from antiphon.kernels.cuda_library import CudaLibrary, KernelLibraryError
from antiphon.kernels.dense import skinny
from antiphon.kernels.moe import build as moe
from antiphon.protocol.errors import AntiphonError

LIBRARIES: tuple[CudaLibrary, ...] = (skinny.LIBRARY, moe.LIBRARY, prefill_hopper.LIBRARY, one_shot.LIBRARY)
"""Every library that a worker on an H200 loads."""


def build_kernels() -> None:
    """Build what is missing; prints each library's path.

    Raises:
        AntiphonError: no nvcc, or it failed.
    """
    for library in LIBRARIES:
        try:
            print(library.build())
        except KernelLibraryError as error:
            raise AntiphonError(str(error)) from error
