"""FP8 pages widened for kernels that read them in the queries' dtype, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "len_ptr"])
def _widen_pages(
    data_ptr,
    table_ptr,
    len_ptr,
    wide_ptr,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
):
    """One logical page of one sequence, all its heads."""
    i = tl.program_id(0)
    b = tl.program_id(1)
    if i * PAGE >= tl.load(len_ptr + b):
        return
    page = tl.load(table_ptr + b * table_stride + i).to(tl.int64)
    row = tl.arange(0, 2 * PAGE)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    for g in range(HEADS):
        head = data_ptr + page * page_stride + g * HEAD_BYTES
        numbers = tl.load(head + at).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        scales = (head + 2 * PAGE * DIM).to(tl.pointer_type(tl.bfloat16))
        scale = tl.load(scales + row).to(tl.float32)
        wide = (numbers * scale[:, None]).to(wide_ptr.dtype.element_ty)
        tl.store(wide_ptr + (page * HEADS + g) * 2 * PAGE * DIM + at, wide)


class WidePages:
    """Room for every page of a layer in another dtype; layer after layer uses it.

    A page lies there under its own number, so block tables hold for both. A page of which only a part was
    written is widened whole.
    """

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def reserve(self, layer: Fp8Pages, dtype: torch.dtype) -> Tensor:
        """[N, G, 2, S, D] for layers of this shape; it stays where it is, so graphs may hold it."""
        room = self._room
        if room is None or room.shape != layer.shape or room.dtype != dtype:
            room = self._room = torch.empty(layer.shape, dtype=dtype, device=layer.data.device)
        return room

    def widen(self, layer: Fp8Pages, sequences: PagedSequences, dtype: torch.dtype) -> Tensor:
        """[N, G, 2, S, D] in which the pages of these sequences hold what they hold in ``layer``."""
        room = self.reserve(layer, dtype)
        table = sequences.block_table
        _widen_pages[(table.shape[1], table.shape[0])](
            layer.data,
            table,
            sequences.kv_len,
            room,
            layer.data.stride(0),
            table.stride(0),
            HEADS=layer.shape[1],
            HEAD_BYTES=head_bytes(layer.page_size, layer.head_dim),
            PAGE=layer.page_size,
            DIM=layer.head_dim,
            num_warps=4,
        )
        return room
