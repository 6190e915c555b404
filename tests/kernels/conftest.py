"""CUDA sources of this project compiled for the host (see on_host/cuda_on_host.h), called on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


class HostLibrary:
    """Launchers of a library; a launch is over when its call returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Tensor | float | ctypes.c_int64 | None) -> None:
        """Run ``antiphon_<name>``; a tensor is its address, an int a C int; the stream is added."""
        converted: list[object] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                converted.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, float):
                converted.append(ctypes.c_float(argument))
            elif isinstance(argument, int):
                converted.append(ctypes.c_int(argument))
            else:
                converted.append(ctypes.c_void_p() if argument is None else argument)
        status = getattr(self._library, f"antiphon_{name}")(*converted, ctypes.c_void_p())
        assert status == 0, f"{name} refused the launch: {status}"


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    folders += sorted(Path("/usr/local").glob("cuda*/include"))
    return next((folder for folder in folders if (folder / "cuda_fp8.h").exists()), None)


@pytest.fixture(scope="session")
def compile_for_host(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[str]], HostLibrary]:
    """Compiles sources, named from ``kernels/``; skips the test where that cannot be done.

    ANTIPHON_ON_HOST_OPTIONS are further options of the compiler, such as those of a sanitizer.
    """
    headers = _cuda_headers()
    if headers is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and CUDA's headers")
    folder = tmp_path_factory.mktemp("on_host")
    host = HERE / "on_host" / "cuda_on_host.h"
    options = os.environ.get("ANTIPHON_ON_HOST_OPTIONS", "").split()

    def compiled(sources: Sequence[str]) -> HostLibrary:
        objects = []
        for source in sources:
            target = folder / f"{Path(source).stem}.o"
            command = ["g++", "-x", "c++", "-std=c++20", "-O1", "-fPIC", "-w", "-c", str(KERNELS / source)]
            command += ["-I", str(headers), "-I", str(headers / "cccl"), f'-DANTIPHON_ON_HOST="{host}"']
            command += options
            subprocess.run([*command, "-o", str(target)], check=True)
            objects.append(str(target))
        library = folder / f"{Path(sources[0]).stem}.so"
        subprocess.run(["g++", "-shared", "-pthread", *options, *objects, "-o", str(library)], check=True)
        return HostLibrary(ctypes.CDLL(str(library)))

    return compiled
