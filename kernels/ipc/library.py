"""The library of what lies between GPUs of one host: memory that another process maps, and copies into it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TypeVar

from antiphon.kernels.cuda_library import CudaLibrary

_Library = TypeVar("_Library", bound=ctypes.CDLL)

_HERE = Path(__file__).parent
LIBRARY = CudaLibrary(
    "ipc",
    (_HERE / "memory.cu", _HERE / "run_copy.cu", _HERE / "copy_stream.cu"),
    headers=(_HERE / "on_device.cuh", _HERE / "page_rows.cuh", _HERE.parent / "moe" / "csrc" / "hopper.cuh"),
)


@cache
def library() -> ctypes.CDLL:
    """Its calls, with the types of their arguments.

    Raises:
        KernelLibraryError: the library was not built.
    """
    return _typed(LIBRARY.load())


@cache
def quick_library() -> ctypes.PyDLL:
    """The same, called without giving up the interpreter: for calls of microseconds.

    A thread that gives it up gets it back only when the engine's thread lets go, milliseconds later.

    Raises:
        KernelLibraryError: the library was not built.
    """
    loaded = library()
    return _typed(ctypes.PyDLL(loaded._name, handle=loaded._handle))


def _typed(found: _Library) -> _Library:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.antiphon_ipc_allocate.argtypes = [number, ctypes.c_size_t, pointer, pointer]
    found.antiphon_ipc_export.argtypes = [number, ctypes.c_uint64, pointer, pointer, pointer]
    found.antiphon_ipc_size.argtypes = [number, ctypes.c_uint64, pointer]
    found.antiphon_ipc_open.argtypes = [number, pointer, pointer]
    found.antiphon_ipc_close.argtypes = found.antiphon_ipc_free.argtypes = [number, pointer]
    found.antiphon_ipc_reason.argtypes = [number]
    found.antiphon_ipc_reason.restype = ctypes.c_char_p
    found.antiphon_run_copy.argtypes = [pointer, number, number, pointer]
    found.antiphon_copy_stream_make.argtypes = [number, pointer]
    found.antiphon_copy_event_make.argtypes = [number, pointer]
    found.antiphon_copy_pages.argtypes = [number, pointer, number, number, *(pointer,) * 4]
    found.antiphon_copy_state.argtypes = [pointer]
    return found
