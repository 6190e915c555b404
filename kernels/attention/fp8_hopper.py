"""FP8 pages in CUDA for sm_90 and GPT-OSS's heads: decode attention, and the write of a few tokens.

The kernels are described in ``csrc``. Other shapes and devices take ``decode_fp8`` and ``dense.rope``; chunks
are written by ``prefill_hopper.chunk_rope_and_write`` and widened for their attention by ``widen``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.attention.decode_fp8 import check_decode
from antiphon.kernels.attention.split_parts import SplitParts
from antiphon.kernels.cuda_library import CudaLibrary, check_launch
from antiphon.kernels.fp8_pages import Fp8Pages
from antiphon.kernels.reference import PagedSequences

PAGE = 64
HEAD_DIM = 64
GROUP = 8
"""Query heads of a kv head."""
MAX_SPLITS = 32
_RESIDENT_BLOCKS = 3 * 132
"""Blocks of decode attention that an H200 holds at one time, by their registers."""

_SOURCES = Path(__file__).with_name("csrc")
LIBRARY = CudaLibrary(
    "fp8_attention",
    (_SOURCES / "fp8_decode.cu", _SOURCES / "fp8_store.cu"),
    headers=(_SOURCES / "fp8_pages.cuh", _SOURCES.parent.parent / "moe" / "csrc" / "hopper.cuh"),
)


@cache
def _library() -> ctypes.CDLL:
    library = LIBRARY.load()
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    library.antiphon_fp8_decode.argtypes = [
        *(*(pointer,) * 9, long, *(number,) * 4, ctypes.c_float, number, pointer)
    ]
    library.antiphon_fp8_store.argtypes = [pointer, pointer, pointer, long, *(number,) * 5, pointer]
    return library


def choose_fp8_splits(batch_size: int, kv_heads: int) -> int:
    """Splits of a sequence's keys: those with which the last wave of blocks is fullest, few among equals."""
    programs = batch_size * kv_heads

    def time(splits: int) -> float:
        return -(-programs * splits // _RESIDENT_BLOCKS) / splits

    most = min(MAX_SPLITS, max(1, 4 * _RESIDENT_BLOCKS // programs))
    return min(range(1, most + 1), key=lambda splits: (round(time(splits), 9), splits))


class HopperFp8DecodeAttention:
    """Decode attention of full layers for a fixed batch size; safe to capture in a CUDA graph.

    Args:
        batch_size: B, one query token per sequence.
        kv_heads: G, each with 8 query heads of 64 numbers.
        splits: programs that share one sequence's keys; None chooses from the batch size.
        pdl: programmatic dependent launch.
    """

    def __init__(
        self,
        batch_size: int,
        kv_heads: int,
        device: torch.device,
        splits: int | None = None,
        pdl: bool = False,
    ) -> None:
        self.batch_size, self.kv_heads = batch_size, kv_heads
        self.splits = choose_fp8_splits(batch_size, kv_heads) if splits is None else splits
        self._pdl = pdl
        self._parts = SplitParts(batch_size * kv_heads * GROUP, HEAD_DIM, self.splits, device, pdl)

    def full(
        self,
        query: Tensor,
        pages: Fp8Pages,
        sequences: PagedSequences,
        sinks: Tensor,
        sm_scale: float,
        out: Tensor,
    ) -> Tensor:
        """All keys. Shapes as in ``reference.paged_attention`` with T = B; writes and returns ``out``.

        Args:
            query, out: [B, 8 G, 64] bf16 contiguous.
            sinks: [8 G] float32.

        Raises:
            ValueError: another shape, dtype or layout.
            KernelLibraryError: the library was not built.
        """
        check_decode(self.batch_size, GROUP * self.kv_heads, query, pages, sequences, sinks)
        if pages.shape[1:] != (self.kv_heads, 2, PAGE, HEAD_DIM):
            raise ValueError(f"pages are {pages.shape}, expected [N, {self.kv_heads}, 2, {PAGE}, {HEAD_DIM}]")
        if query.dtype != torch.bfloat16 or sinks.dtype != torch.float32:
            raise ValueError(f"query is {query.dtype}, sinks {sinks.dtype}: expected bfloat16 and float32")
        if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
            raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, expected as the query, contiguous")
        parts = self._parts
        status = _library().antiphon_fp8_decode(
            *(query.data_ptr(), pages.data.data_ptr(), sequences.block_table.data_ptr()),
            *(sequences.kv_len.data_ptr(), sinks.data_ptr(), out.data_ptr()),
            *(parts.acc.data_ptr(), parts.max.data_ptr(), parts.sum.data_ptr()),
            *(pages.data.stride(0), sequences.block_table.stride(0), self.batch_size, self.kv_heads),
            *(self.splits, sm_scale, int(self._pdl), torch.cuda.current_stream().cuda_stream),
        )
        check_launch(status, "decode attention over FP8 pages")
        if self.splits > 1:
            parts.merge(out)
        return out


class FewTokens:
    """Room for keys and values of at most 16 tokens in bf16, between their projection and their FP8 pages.

    Attributes:
        kv: [1, G, 2, 16, 64] bf16, a page that the projection writes to.
        slot: [16] int64, each token's place there.
    """

    ROOM = 16

    def __init__(self, kv_heads: int, device: torch.device) -> None:
        if kv_heads % 2:
            raise ValueError(f"{kv_heads} kv heads: the kernel takes an even number")
        shape = (1, kv_heads, 2, self.ROOM, HEAD_DIM)
        self.kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.slot = torch.arange(self.ROOM, device=device)

    def store(self, pages: Fp8Pages, slot: Tensor, pdl: bool = False) -> None:
        """Write them to ``slot`` [T] int64 of FP8 pages; a negative slot is not stored.

        Raises:
            ValueError: another shape, or more tokens than there is room for.
            KernelLibraryError: the library was not built.
        """
        tokens, kv_heads = slot.shape[0], self.kv.shape[1]
        if pages.shape[1] != kv_heads or pages.head_dim != HEAD_DIM or not 1 <= tokens <= self.ROOM:
            raise ValueError(
                f"{tokens} tokens to pages {pages.shape}: expected 1 to {self.ROOM} and {kv_heads} heads"
            )
        if slot.dtype != torch.int64 or not slot.is_contiguous():
            raise ValueError(f"slot is {slot.dtype}, expected contiguous int64")
        status = _library().antiphon_fp8_store(
            *(self.kv.data_ptr(), slot.data_ptr(), pages.data.data_ptr(), pages.data.stride(0), tokens),
            *(kv_heads, self.ROOM, pages.page_size, int(pdl), torch.cuda.current_stream().cuda_stream),
        )
        check_launch(status, "write of FP8 pages")
