"""Triton kernels compiled ahead of time, so that a worker only loads them.

``compile_only`` makes launches of Triton kernels compile for sm_90 and not run; it needs no GPU. What is made
lies in Triton's cache, in the folder ``triton`` beside the CUDA libraries, and refers to itself by absolute
paths: build where workers will look. ``load_only`` makes this process use that folder and compile nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.build import compile_module_from_src, platform_key
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from antiphon.kernels.cuda_library import KernelLibraryError, library_folders

TARGET = GPUTarget("cuda", 90, 32)
_DRIVER = "libcuda.so.1"


def triton_folder() -> Path:
    """Where Triton kernels are built and looked for."""
    return library_folders()[0] / "triton"


class _NoDevice:
    """What a launch asks Triton's driver for, where there is no GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextmanager
def compile_only(folder: Path) -> Iterator[list[str]]:
    """Within, launches compile for sm_90 into ``folder`` and run nothing; tensors may be on the CPU.

    Yields the list to which the name of every kernel is added that was not there before.

    Raises:
        KernelLibraryError: Triton's interpreter is on.
    """
    if knobs.runtime.interpret:
        raise KernelLibraryError("TRITON_INTERPRET is set: Triton compiles nothing")
    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    with knobs.cache.scope(), knobs.compilation.scope(), without_launches():
        knobs.cache.dir = str(folder)
        knobs.compilation.listener = listen
        triton.runtime.driver.set_active(_NoDevice())
        try:
            yield compiled
        finally:
            triton.runtime.driver._active = None  # chosen anew when a kernel is launched


@contextmanager
def without_launches() -> Iterator[None]:
    """Within, a launch makes its kernel ready, compiled or loaded, and runs nothing."""
    run = JITFunction.run

    def warm_up(self: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> object:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = warm_up
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def missing_kernels() -> Iterator[list[str]]:
    """Within, launches load their kernels and run nothing; yields the list of those that were not built.

    For a process that called ``load_only``.
    """
    missing: list[str] = []
    with without_launches():
        run = JITFunction.run

        def attempt(self: Any, *arguments: object, **options: object) -> object:
            try:
                return run(self, *arguments, **options)
            except (KernelLibraryError, PermissionError):  # a folder for a kernel that is not there
                variant = ", ".join(f"{key}={value}" for key, value in options.items() if key.isupper())
                description = f"{self.fn.__name__}[{variant}]"
                if description not in missing:
                    missing.append(description)
                return None

        JITFunction.run = attempt
        yield missing


def build_driver_module(folder: Path) -> Path:
    """Compile the module through which Triton launches kernels; needs a C compiler, but no GPU.

    Raises:
        KernelLibraryError: there is no compiler, or it failed.
    """
    source = Path(nvidia_driver.__file__).with_name("driver.c").read_text()
    name = f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    with knobs.cache.scope(), tempfile.TemporaryDirectory() as scratch:
        knobs.cache.dir = str(folder)
        found = _cached_driver_module(source, name)
        if found is not None:
            return found
        library = Path(scratch) / _DRIVER  # stands for the driver's, which only has to be named
        stub_source = library.with_suffix(".c")
        # Linkers that are told to name only what is needed ask what is in it.
        stub_source.write_text("".join(f"void {each}(void) {{}}\n" for each in _driver_functions(source)))
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise KernelLibraryError("no C compiler on the PATH for Triton's driver module")
        stub = [compiler, "-shared", str(stub_source), f"-Wl,-soname,{_DRIVER}", "-o", str(library)]
        try:
            subprocess.run(stub, check=True, capture_output=True)
            compile_module_from_src(
                src=source,
                name="cuda_utils",
                library_dirs=[nvidia_driver.libdevice_dir, scratch],
                include_dirs=nvidia_driver.include_dirs,
                libraries=nvidia_driver.libraries,
            )
        except subprocess.CalledProcessError as error:
            raise KernelLibraryError(f"Triton's driver module was not compiled: {error}") from error
        except ImportError as error:
            # It is compiled; only a machine with the driver's library can load it.
            if _DRIVER not in str(error):
                raise KernelLibraryError(f"Triton's driver module cannot be loaded: {error}") from error
        compiled = get_cache_manager(_driver_key(source, platform_key())).get_file(name)
        if compiled is None:
            raise KernelLibraryError(f"Triton's driver module is not in {folder} after it was compiled")
        module = Path(compiled).read_bytes()
        for platform in _platforms():
            get_cache_manager(_driver_key(source, platform)).put(module, name, binary=True)
    return Path(compiled)


def _driver_functions(source: str) -> list[str]:
    """What of the driver's functions the module may call."""
    return sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source)))


def _cached_driver_module(source: str, name: str) -> Path | None:
    """The module, if it lies wherever Triton may look for it."""
    paths = [get_cache_manager(_driver_key(source, platform)).get_file(name) for platform in _platforms()]
    return Path(paths[0]) if paths[0] is not None and None not in paths else None


def _driver_key(source: str, platform: str) -> str:
    """As Triton makes it."""
    return hashlib.sha256((source + platform).encode()).hexdigest()


def _platforms() -> tuple[str, ...]:
    """What Triton may call this platform; as it does here first.

    The format of programs is part of it, which Python knows only where the program ``file`` is installed, and
    a worker's image may lack that.
    """
    mine = platform_key()
    *others, _ = mine.split(",")
    return tuple(dict.fromkeys((mine, *(",".join((*others, linkage)) for linkage in ("ELF", "")))))


def load_only() -> None:
    """From now on this process takes Triton kernels from ``triton_folder()`` and compiles none.

    A launch of a kernel that is not there raises KernelLibraryError.

    Raises:
        KernelLibraryError: there is no such folder.
    """
    folder = triton_folder()
    if not folder.is_dir():
        raise KernelLibraryError(
            f"{folder} does not exist: run `antiphon kernels build` where nvcc and gcc are"
        )
    knobs.cache.dir = str(folder)

    def refuse(self: Any, *_: object, **__: object) -> None:
        raise KernelLibraryError(
            f"a Triton kernel is not in {folder}, and kernels.require_built forbids to compile it: "
            "run `antiphon kernels build` for this model"
        )

    CUDABackend.add_stages = refuse
