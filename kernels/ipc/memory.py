"""Memory of one GPU that the processes of other GPUs of the host map, over CUDA's interprocess handles."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from antiphon.kernels.ipc.library import library

HANDLE_BYTES = 64
"""Of a ``cudaIpcMemHandle_t``."""
GRANULE_BYTES = 2 << 20
"""Smaller allocations share a block of the driver's, all of which a handle would open to the others."""


class IpcMemoryError(RuntimeError):
    """CUDA did not allocate, export, open, close or free; the message has its reason."""


class IpcMemory(Protocol):
    """What a process does with memory that others map. Addresses are of this process, on its device."""

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """Address of so many bytes, zeroed, and the handle by which another process opens them.

        Raises:
            IpcMemoryError: there is no room, or the device's memory cannot be opened by others.
        """

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """The handle of the whole allocation that these bytes lie in, and how far into it they begin.

        Raises:
            IpcMemoryError: they are not of one allocation, or of one that cannot be opened by others.
        """

    def open(self, handle: bytes) -> int:
        """Where another process' memory lies here.

        Raises:
            IpcMemoryError: it is on another host or ended, or this device cannot reach that one; or it was no
                handle.
        """

    def close(self, address: int) -> None:
        """Give up what was opened; nothing that reads or writes it may be running.

        Raises:
            IpcMemoryError: it was not open.
        """

    def free(self, address: int) -> None:
        """Give back what was allocated, once every other process has closed it.

        Raises:
            IpcMemoryError: it was not allocated.
        """


class CudaIpcMemory:
    """Implements ``IpcMemory`` on one GPU; what others open need not be among the GPUs this process sees.

    Raises:
        KernelLibraryError: the library was not built.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = library()
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """See IpcMemory; the address is a multiple of 256."""
        address, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
        whole = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        status = self._library.antiphon_ipc_allocate(self._device, whole, ctypes.byref(address), handle)
        self._check(status, f"{whole} bytes")
        return address.value or 0, handle.raw

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """See IpcMemory; torch's allocations too, unless they are of expandable segments."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        offset, left = ctypes.c_uint64(), ctypes.c_uint64()
        what = f"export of {size_bytes} bytes at {address:#x}"
        status = self._library.antiphon_ipc_export(
            self._device, address, handle, ctypes.byref(offset), ctypes.byref(left)
        )
        self._check(status, f"{what} (memory of expandable segments has no handle)")
        if left.value < size_bytes:
            raise IpcMemoryError(f"{what} on cuda:{self._device}: its allocation ends after {left.value}")
        return handle.raw, offset.value

    def open(self, handle: bytes) -> int:
        """See IpcMemory."""
        if len(handle) != HANDLE_BYTES:
            raise IpcMemoryError(f"open on cuda:{self._device}: {len(handle)} bytes are no handle")
        address = ctypes.c_void_p()
        self._check(self._library.antiphon_ipc_open(self._device, handle, ctypes.byref(address)), "open")
        return address.value or 0

    def size(self, address: int) -> int:
        """Bytes of what was opened, by the driver's own account and not by its owner's.

        Raises:
            IpcMemoryError: the driver does not say.
        """
        left = ctypes.c_uint64()
        status = self._library.antiphon_ipc_size(self._device, address, ctypes.byref(left))
        self._check(status, f"size of what lies at {address:#x}")
        return left.value

    def close(self, address: int) -> None:
        """See IpcMemory."""
        self._check(self._library.antiphon_ipc_close(self._device, address), "close")

    def free(self, address: int) -> None:
        """See IpcMemory."""
        self._check(self._library.antiphon_ipc_free(self._device, address), "free")

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            reason = self._library.antiphon_ipc_reason(status).decode()
            raise IpcMemoryError(f"{what} on cuda:{self._device}: {reason} (CUDA error {status})")
