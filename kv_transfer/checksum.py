"""CRC of registered host memory, for deployments that verify every write."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
from numpy.typing import NDArray

from antiphon.kv_transfer.transport import Memory
from antiphon.protocol.errors import TransferError


def crc32_of(span: Memory, runs: NDArray[np.int64], crc: int = 0) -> int:
    """crc32 over [N, 2] int64 runs of (offset, length) in bytes within a span, going on from ``crc``.

    Raises:
        TransferError: stage ``notify``; the span is not host memory, or a run leaves it.
    """
    if span.kind != "DRAM":
        raise TransferError("notify", f"cannot read {span.kind} to verify a checksum")
    for offset, length in runs.tolist():
        if offset < 0 or length <= 0 or offset + length > span.length_bytes:
            raise TransferError("notify", f"run {(offset, length)} leaves {span.length_bytes} bytes")
        crc = zlib.crc32((ctypes.c_char * length).from_address(span.address + offset), crc)
    return crc
