"""CUDA sources of this project compiled for the host (see on_host/cuda_on_host.h), called on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


WATCHED_BYTES = 8 << 20  # weights are more, and nobody writes them


class RaceError(AssertionError):
    """Accesses that the kernel leaves unordered."""


class HostLibrary:
    """Launchers of a library; a launch is over when its call returns.

    With ``races`` a call raises ``RaceError`` where accesses to shared memory, or to its tensors of up to
    ``WATCHED_BYTES``, are not ordered by what the kernel does itself.
    """

    def __init__(self, path: Path, *, races: bool = False) -> None:
        self._path, self._races = path, races
        self._library = ctypes.CDLL(str(path))

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
        if self._races:
            self._watch([argument for argument in arguments if isinstance(argument, Tensor)])
        status = getattr(self._library, f"antiphon_{name}")(*converted, ctypes.c_void_p())
        found = self._found() if self._races else ""
        assert status == 0, f"{name} refused the launch: {status}"
        if found:
            raise RaceError(f"{name}:\n{found}")

    def _watch(self, tensors: list[Tensor]) -> None:
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        for address, size in sizes.items():
            if size <= WATCHED_BYTES:
                self._library.antiphon_races_watch(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def _found(self) -> str:
        """The races of the last launch, with lines of the sources for places in the library."""
        self._library.antiphon_races_found.restype = ctypes.c_char_p
        report: str = self._library.antiphon_races_found().decode()
        places = sorted(set(re.findall("@(0x[0-9a-f]+)", report)))
        if not places:
            return report
        command = ["addr2line", "-e", str(self._path), *places]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        named = {place: Path(line.split(" ")[0]).name for place, line in zip(places, lines, strict=True)}
        return re.sub("@(0x[0-9a-f]+)", lambda place: f"at {named[place[1]]}", report)


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

    With ``races`` calls also look for accesses that nothing orders (on_host/races.cpp).

    ANTIPHON_ON_HOST_OPTIONS are further options of the compiler, such as those of a sanitizer.
    """
    headers = _cuda_headers()
    if headers is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and CUDA's headers")
    folder = tmp_path_factory.mktemp("on_host")
    host = HERE / "on_host" / "cuda_on_host.h"
    options = os.environ.get("ANTIPHON_ON_HOST_OPTIONS", "").split()
    # A library has its own copy of what its threads of the operating system hold.
    checked = ["-DANTIPHON_RACES", "-fno-gnu-unique"]

    def checker() -> Path:
        target = folder / "races.o"
        if not target.exists():
            command = ["g++", "-std=c++20", "-O2", "-fPIC", *checked, "-c"]
            subprocess.run([*command, str(HERE / "on_host" / "races.cpp"), "-o", str(target)], check=True)
        return target

    def compiled(sources: Sequence[str], *, races: bool = False) -> HostLibrary:
        if races and (shutil.which("addr2line") is None or any("-fsanitize" in each for each in options)):
            pytest.skip("needs addr2line, and no sanitizer besides")
        name = Path(sources[0]).stem + ("_races" if races else "")
        objects = []
        for source in sources:
            target = folder / f"{name}_{Path(source).stem}.o"
            command = ["g++", "-x", "c++", "-std=c++20", "-O1", "-fPIC", "-w", "-c", str(KERNELS / source)]
            command += ["-I", str(headers), "-I", str(headers / "cccl"), f'-DANTIPHON_ON_HOST="{host}"']
            command += [*options, *(["-g", "-fsanitize=thread", *checked] if races else [])]
            subprocess.run([*command, "-o", str(target)], check=True)
            objects.append(str(target))
        if races:
            objects.append(str(checker()))
        library = folder / f"{name}.so"
        subprocess.run(["g++", "-shared", "-pthread", *options, *objects, "-o", str(library)], check=True)
        return HostLibrary(library, races=races)

    return compiled
