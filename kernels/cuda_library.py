"""CUDA sources of this project, compiled ahead of time into plain shared libraries.

A library is found by the hash of its sources and compiler options, so a stale one is never loaded. Workers
only load; building needs ``nvcc`` and is done by ``antiphon kernels build`` or while an image is made.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

NVCC_OPTIONS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
    "-shared",
)


class KernelLibraryError(RuntimeError):
    """A CUDA library is missing or cannot be built; the message says which and what to do."""


def library_folders() -> tuple[Path, ...]:
    """Where libraries are looked for, first match wins; the first one is also where builds go."""
    configured = os.environ.get("ANTIPHON_KERNEL_LIBRARY_DIR")
    if configured:
        return (Path(configured),)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return (cache / "antiphon" / "kernels",)


@dataclass(frozen=True)
class CudaLibrary:
    """One shared library.

    Attributes:
        name: file name stem.
        sources: .cu files, compiled together; ``headers`` only count for the hash.
        options: compiler options beyond NVCC_OPTIONS.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """``<name>-<hash of sources and options>.so``."""
        digest = hashlib.sha256(repr((NVCC_OPTIONS, self.options)).encode())
        for path in (*self.sources, *self.headers):
            digest.update(path.read_bytes())
        return f"{self.name}-{digest.hexdigest()[:16]}.so"

    def for_racecheck(self) -> CudaLibrary:
        """The kernels as compute-sanitizer's racecheck is to watch them; ``hopper.cuh`` has what differs."""
        options = (*self.options, "-DANTIPHON_FOR_RACECHECK")
        return replace(self, name=f"{self.name}_for_racecheck", options=options)

    def find(self) -> Path | None:
        """Where the library built from exactly these sources is."""
        found = (folder / self.file_name for folder in library_folders())
        return next((path for path in found if path.exists()), None)

    def load(self) -> ctypes.CDLL:
        """Load the library built from exactly these sources.

        Raises:
            KernelLibraryError: it was not built.
        """
        path = self.find()
        if path is not None:
            return ctypes.CDLL(str(path))
        places = ", ".join(str(folder) for folder in library_folders())
        raise KernelLibraryError(
            f"kernel library {self.file_name} is not in {places}: "
            "run `antiphon kernels build` on a machine with nvcc"
        )

    def build(self) -> Path:
        """Compile with nvcc unless it is already there; returns the library's path.

        Raises:
            KernelLibraryError: no nvcc, or it failed; the message carries its first error line.
        """
        folder = library_folders()[0]
        target = folder / self.file_name
        if target.exists():
            return target
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None:
            raise KernelLibraryError(f"cannot build {self.name}: nvcc is not on the PATH")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            # As many sources at a time as there are cores; the result is the same.
            options = ("--threads", "0", *NVCC_OPTIONS, *self.options)
            command = [nvcc, *options, *map(str, self.sources), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                lines = [line for line in result.stderr.splitlines() if "error" in line] or [
                    result.stderr.strip()
                ]
                raise KernelLibraryError(f"building {self.name} failed: {lines[0]}")
            built.rename(target)
        return target


def check_launch(status: int, kernel: str) -> None:
    """Raise when a launcher returned a CUDA error code.

    Raises:
        RuntimeError: naming the kernel and the code.
    """
    if status != 0:
        raise RuntimeError(f"{kernel}: CUDA launch failed with error {status}")
