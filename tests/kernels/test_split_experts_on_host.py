"""Experts that ranks hold columns of, thread by thread on the host: what all ranks add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.decode import TOKEN_TILES, max_tiles
from antiphon.kernels.moe.mixed import ROW_BYTES, TILES, RowExponents
from antiphon.kernels.moe.streamed import DIM, SPLIT_COLUMNS, StreamedExperts
from antiphon.kernels.reference import MXFP4_BLOCK, ExpertMatrix, dequantize_mxfp4

EXPERTS, BLOCKS = 2, 3
RANKS = dict(zip((2, 4, 8), SPLIT_COLUMNS, strict=True))
GUARD = 4096
"""Poisoned bytes behind the hidden states, which nobody may write."""


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    sources = ("split/stream_split.cu", "routing.cu", "combine.cu", "split_tokens.cu", "split/mixed_split.cu")
    sources += ("mixed_quantise.cu", "fp8_route.cu")
    return compile_for_host([f"moe/csrc/{name}" for name in sources])


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


class Part:
    """A layer's experts, or one rank's columns of them."""

    def __init__(self, gate_up: ExpertMatrix, gate_up_bias: Tensor, down: ExpertMatrix, down_bias: Tensor):
        self.gate_up, self.gate_up_bias, self.down, self.down_bias = gate_up, gate_up_bias, down, down_bias

    def streamed(self) -> StreamedExperts:
        return StreamedExperts.from_checkpoint(self.gate_up, self.gate_up_bias, self.down, self.down_bias)

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        here = ids >= 0
        return reference.moe(
            *(x.float(), torch.where(here, ids, 0), torch.where(here, weights.float(), 0.0)),
            *(dequantize_mxfp4(self.gate_up), self.gate_up_bias.float()),
            *(dequantize_mxfp4(self.down), self.down_bias.float()),
        )

    def rank(self, rank: int, ranks: int) -> Part:
        """Its whole blocks of columns, padded with zeros; the first rank has the second bias."""
        begin, end = (DIM // MXFP4_BLOCK * r // ranks for r in (rank, rank + 1))
        columns = RANKS[ranks]
        rows, held = slice(2 * MXFP4_BLOCK * begin, 2 * MXFP4_BLOCK * end), slice(begin, end)

        def padded(tensor: Tensor, axis: int, size: int) -> Tensor:
            shape = list(tensor.shape)
            shape[axis] = size - shape[axis]
            return torch.cat((tensor, tensor.new_zeros(shape)), axis)

        blocks = columns // MXFP4_BLOCK
        return Part(
            ExpertMatrix(
                padded(self.gate_up.blocks[:, rows], 1, 2 * columns),
                padded(self.gate_up.scales[:, rows], 1, 2 * columns),
            ),
            padded(self.gate_up_bias[:, rows], 1, 2 * columns),
            ExpertMatrix(
                padded(self.down.blocks[:, :, held], 2, blocks),
                padded(self.down.scales[:, :, held], 2, blocks),
            ),
            self.down_bias if rank == 0 else torch.zeros_like(self.down_bias),
        )


@pytest.fixture(scope="module")
def layer() -> Part:
    torch.manual_seed(0)

    def matrix(rows: int) -> ExpertMatrix:
        blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8)
        return ExpertMatrix(blocks, torch.randint(116, 121, (EXPERTS, rows, 90), dtype=torch.uint8))

    biases = (torch.randn(EXPERTS, rows).bfloat16() for rows in (2 * DIM, DIM))
    return Part(matrix(2 * DIM), next(biases), matrix(DIM), next(biases))


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, 2880], ids [T, 4] of which two are padding, weights [T, 4]."""
    torch.manual_seed(tokens)
    ids = torch.tensor([[0, 1, -1, -1]]).repeat(tokens, 1)
    return torch.randn(tokens, DIM).bfloat16(), ids, torch.softmax(torch.randn(tokens, 4), -1).bfloat16()


def decoded(
    library: Any, experts: StreamedExperts, x: Tensor, ids: Tensor, weights: Tensor, tile: int
) -> Tensor:
    """[T, 2880] bf16 of the streamed kernel, in poisoned buffers."""
    tokens, pairs = x.shape[0], ids.numel()
    limit = max_tiles(pairs, EXPERTS, tile)
    order = torch.full((pairs,), -(2**30), dtype=torch.int32)
    tiles = torch.full((limit, 4), -(2**30), dtype=torch.int32)
    tile_count, ready = torch.zeros(1, dtype=torch.int32), torch.full((limit,), 1 << 20, dtype=torch.int32)
    activations = torch.full((tokens, 2 * DIM), 0x7F, dtype=torch.uint8)
    scale = torch.full((tokens,), float("nan"))
    hidden = torch.full((limit * tile * 2 * experts.columns + GUARD,), 0x7F, dtype=torch.uint8)
    partial = torch.full((pairs, DIM), float("nan"))
    out = torch.full((tokens, DIM), float("nan")).bfloat16()
    library.call("moe_group", ids, pairs, order, tiles, tile_count, ready, 0, EXPERTS, tile, 0)
    library.call("moe_split", x, activations, scale, tokens, tile, 0)
    library.call(
        "moe_split_experts",
        *(experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias, activations, scale, order),
        *(tiles, tile_count, ready, hidden, weights, partial, limit, experts.columns, tile, BLOCKS, 0),
    )
    library.call("moe_combine", partial, ids, out, tokens, 0, EXPERTS, 0)
    assert (hidden[-GUARD:] == 0x7F).all()
    return out


@pytest.mark.parametrize(("ranks", "tile", "tokens"), [(2, 4, 2), (4, 16, 3)])
def test_decoded_parts_of_split_experts_add_up_to_whole_ones(
    library: Any, layer: Part, ranks: int, tile: int, tokens: int
) -> None:
    assert tile in TOKEN_TILES
    x, ids, weights = routed(tokens)
    total = torch.zeros(tokens, DIM)
    for rank in range(ranks):
        part = layer.rank(rank, ranks)
        out = decoded(library, part.streamed(), x, ids, weights, tile)
        assert error(out, part.plain(x, ids, weights)) <= 4e-3
        total += out.float()
    assert error(total, layer.plain(x, ids, weights)) <= 4e-3


@pytest.mark.parametrize(("tile", "tokens"), [(8, 9), (24, 2)])
def test_other_tiles_of_one_rank(library: Any, layer: Part, tile: int, tokens: int) -> None:
    part = layer.rank(5, 8)
    out = decoded(library, part.streamed(), *routed(tokens), tile)
    assert error(out, part.plain(*routed(tokens))) <= 4e-3


def chunk(library: Any, part: Part, x: Tensor, ids: Tensor, weights: Tensor, tile: int) -> Tensor:
    """[T, 2880] float32: what the weighted rows of a chunk's kernels add up to, in poisoned buffers."""
    experts, tops = part.streamed(), RowExponents.from_checkpoint(part.gate_up, part.down)
    tokens, pairs, columns = x.shape[0], ids.numel(), experts.columns
    most = pairs // tile + EXPERTS
    rank, slots = (torch.full((pairs,), -(2**30), dtype=torch.int32) for _ in range(2))
    counts, first_tile = (torch.full((EXPERTS,), -(2**30), dtype=torch.int32) for _ in range(2))
    tiles = torch.full((most, 4), -(2**30), dtype=torch.int32)
    tile_count, ticket = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    activations = torch.full((most * tile * ROW_BYTES,), 0x7F, dtype=torch.uint8)
    hidden = torch.full((most * tile * columns + GUARD,), 0x7F, dtype=torch.uint8)
    token_scale, row_weight = (torch.full((most * tile,), float("nan")) for _ in range(2))
    ready = torch.zeros(1 + most, dtype=torch.int32)
    rows = torch.full((most * tile, DIM), float("nan")).bfloat16()
    library.call(
        "moe_fp8_rank",
        *(ids, rank, counts, first_tile, tiles, tile_count, ticket, pairs, 0, EXPERTS, tile),
    )
    library.call(
        "moe_mixed_quantise",
        *(x, ids, weights, rank, first_tile, activations, token_scale, row_weight, slots),
        *(tokens, 0, EXPERTS, tile, 0),
    )
    library.call(
        "moe_split_mixed_experts",
        *(activations, experts.gate_up, tops.gate_up, experts.gate_up_bias),
        *(experts.down, tops.down, experts.down_bias, tiles, tile_count, ready),
        *(token_scale, row_weight, hidden, rows, columns, tile, BLOCKS),
    )
    assert not ready.any()
    assert (hidden[-GUARD:] == 0x7F).all()
    placed = slots.reshape(tokens, 4).long()
    return torch.where((placed >= 0)[..., None], rows[placed].float(), 0.0).sum(1)


@pytest.mark.parametrize(("ranks", "tile"), [(2, 32), (4, 48)])
def test_a_chunks_parts_of_split_experts_add_up_to_whole_ones(
    library: Any, layer: Part, ranks: int, tile: int
) -> None:
    x, ids, weights = routed(2)
    total = torch.zeros(2, DIM)
    for rank in range(ranks):
        part = layer.rank(rank, ranks)
        out = chunk(library, part, x, ids, weights, tile)
        assert error(out, part.plain(x, ids, weights)) <= 4e-2
        total += out
    assert error(total, layer.plain(x, ids, weights)) <= 4e-2


@pytest.mark.parametrize(("ranks", "tile"), [(8, 32), (8, 64), (8, 160), (4, 256), (8, 288)])
def test_chunks_of_one_rank_with_wider_tiles(library: Any, layer: Part, ranks: int, tile: int) -> None:
    part = layer.rank(ranks - 1, ranks)
    x, ids, weights = routed(1)
    out = chunk(library, part, x, ids, weights, tile)
    assert error(out, part.plain(x, ids, weights)) <= 4e-2


@pytest.fixture
def empty() -> Part:
    """Nothing but padding."""
    return Part(
        *(
            ExpertMatrix(torch.zeros(EXPERTS, 768, 90, 16).byte(), torch.zeros(EXPERTS, 768, 90).byte()),
            torch.zeros(EXPERTS, 768).bfloat16(),
            ExpertMatrix(torch.zeros(EXPERTS, DIM, 12, 16).byte(), torch.zeros(EXPERTS, DIM, 12).byte()),
            torch.zeros(EXPERTS, DIM).bfloat16(),
        )
    )


@pytest.mark.parametrize("tile", TOKEN_TILES)
def test_columns_that_pad_add_exactly_nothing(library: Any, empty: Part, tile: int) -> None:
    assert not decoded(library, empty.streamed(), *routed(1), tile).any()


@pytest.mark.parametrize("tile", [TILES[0], TILES[-1]])
def test_columns_that_pad_add_exactly_nothing_in_chunks(library: Any, empty: Part, tile: int) -> None:
    assert not chunk(library, empty, *routed(1), tile).any()


@pytest.mark.parametrize("columns", [0, 100, 192, 3072])
def test_other_widths_are_refused(library: Any, columns: int) -> None:
    for name, pointers, sizes in (
        ("moe_split_experts", 13, (1, columns, 8, BLOCKS, 0)),
        ("moe_split_mixed_experts", 14, (columns, 32, BLOCKS)),
    ):
        with pytest.raises(AssertionError, match=f"{name} refused the launch"):
            library.call(name, *[None] * pointers, *sizes)
