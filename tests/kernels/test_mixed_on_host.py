"""The MoE of a chunk, thread by thread on the host, against the plain op in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.mixed import ROW_BYTES, RowExponents
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

EXPERTS, BLOCKS, BOUND = 3, 3, 4e-2
SOURCES = ["mixed_experts.cu", "mixed_quantise.cu", "fp8_route.cu"]


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"moe/csrc/{name}" for name in SOURCES])


class Layer:
    def __init__(self) -> None:
        torch.manual_seed(0)

        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8)
            return ExpertMatrix(blocks, torch.randint(116, 121, (EXPERTS, rows, 90), dtype=torch.uint8))

        self.gate_up, self.down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * DIM).bfloat16()
        self.down_bias = torch.randn(EXPERTS, DIM).bfloat16()
        self.streamed = StreamedExperts.from_checkpoint(
            self.gate_up, self.gate_up_bias, self.down, self.down_bias
        )
        self.exponents = RowExponents.from_checkpoint(self.gate_up, self.down)

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return reference.moe(
            *(x.float(), ids, weights.float(), dequantize_mxfp4(self.gate_up), self.gate_up_bias.float()),
            *(dequantize_mxfp4(self.down), self.down_bias.float()),
        )


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def run(
    library: Any, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, tile: int, launches: int = 1
) -> Tensor:
    """[T, 2880] float32: what the weighted rows of the last of so many launches add up to."""
    tokens, pairs = x.shape[0], ids.numel()
    most = pairs // tile + EXPERTS
    rank, slots = (torch.full((pairs,), -(2**30), dtype=torch.int32) for _ in range(2))
    counts, first_tile = (torch.full((EXPERTS,), -(2**30), dtype=torch.int32) for _ in range(2))
    tiles = torch.full((most, 4), -(2**30), dtype=torch.int32)
    tile_count, ticket = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    activations, hidden = (torch.full((most * tile * ROW_BYTES,), 0x7F, dtype=torch.uint8) for _ in range(2))
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
        *(tokens, 0, EXPERTS, tile, 1),
    )
    streamed, tops = layer.streamed, layer.exponents
    for _ in range(launches):
        hidden.fill_(0x7F)
        rows.fill_(float("nan"))
        library.call(
            "moe_mixed_experts",
            *(activations, streamed.gate_up, tops.gate_up, streamed.gate_up_bias),
            *(streamed.down, tops.down, streamed.down_bias, tiles, tile_count, ready),
            *(token_scale, row_weight, hidden, rows, tile, BLOCKS, 1),
        )
        assert not ready.any()
    assert int(tile_count) == sum(-(-int(count) // tile) for count in counts)
    placed = slots.reshape(tokens, 4).long()
    assert torch.equal(placed < 0, ids < 0)
    return torch.where((placed >= 0)[..., None], rows[placed].float(), 0.0).sum(1)


@pytest.mark.parametrize(
    ("tile", "ids"),
    [
        (32, [[0, 1, -1, -1], [1, -1, -1, -1], [-1, -1, -1, -1], [1, 0, -1, -1]]),
        (160, [[-1, 1, -1, -1], [1, -1, -1, -1], [-1, -1, -1, -1]]),  # one expert: its products are many
        (288, [[-1, 2, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]),
    ],
)
def test_few_and_many_tokens_an_expert(library: Any, layer: Layer, tile: int, ids: list[list[int]]) -> None:
    torch.manual_seed(tile)
    chosen = torch.tensor(ids)
    x = torch.randn(len(ids), DIM).bfloat16()
    weights = torch.softmax(torch.randn(len(ids), 4), -1).bfloat16()
    out = run(library, layer, x, chosen, weights, tile)
    held = torch.where(chosen < 0, 2, chosen)  # expert 2 gets nothing, so nothing is what it adds
    expected = layer.plain(x, held, torch.where(chosen < 0, 0.0, weights.float()))
    assert float((out - expected).norm() / expected.norm()) <= BOUND


@pytest.mark.parametrize(
    ("tile", "tokens"),
    [(32, 35), (48, 41), (160, 70), (256, 3), (288, 65)],  # two tiles, and products wider than the narrowest
)
def test_tokens_of_one_expert_in_several_tiles_and_widths(
    library: Any, layer: Layer, tile: int, tokens: int
) -> None:
    torch.manual_seed(tile)
    x = torch.randn(tokens, DIM).bfloat16()
    ids = torch.full((tokens, 4), -1)
    ids[:, 1] = 1
    weights = torch.softmax(torch.randn(tokens, 4), -1).bfloat16()
    out = run(library, layer, x, ids, weights, tile)
    expected = layer.plain(x, ids.clamp(min=0), torch.where(ids < 0, 0.0, weights.float()))
    assert float((out - expected).norm() / expected.norm()) <= BOUND


@pytest.mark.parametrize("tile", [32, 160, 256, 288])
def test_a_chunk_that_meets_no_expert_here_ends_and_leaves_all_counts_clear(
    library: Any, layer: Layer, tile: int
) -> None:
    x, weights = torch.randn(3, DIM).bfloat16(), torch.full((3, 4), 0.25).bfloat16()
    assert not run(library, layer, x, torch.full((3, 4), -1), weights, tile, launches=2).any()


def test_a_second_launch_waits_for_its_own_hidden_states(library: Any, layer: Layer) -> None:
    torch.manual_seed(5)
    x, weights = torch.randn(1, DIM).bfloat16(), torch.tensor([[0.5, 0.0, 0.0, 0.0]]).bfloat16()
    out = run(library, layer, x, torch.tensor([[2, -1, -1, -1]]), weights, 160, launches=2)
    expected = layer.plain(x, torch.tensor([[2, 0, 0, 0]]), weights.float())
    assert float((out - expected).norm() / expected.norm()) <= BOUND


def test_tiles_of_experts_with_the_most_tokens_come_first(library: Any) -> None:
    loads, tile = [3, 70, 0, 33, 33, 64, 1], 32
    ids = torch.tensor([expert for expert, load in enumerate(loads) for _ in range(load)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    experts, most = len(loads), 7 + len(loads)
    rank = torch.full_like(ids, -(2**30), dtype=torch.int32)
    counts, first_tile = (torch.full((experts,), -(2**30), dtype=torch.int32) for _ in range(2))
    tiles = torch.full((most, 4), -(2**30), dtype=torch.int32)
    tile_count, ticket = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    library.call(
        "moe_fp8_rank",
        *(ids, rank, counts, first_tile, tiles, tile_count, ticket, len(ids), 0, experts, tile),
    )
    assert counts.tolist() == loads
    expected = []
    for expert in (1, 5, 3, 4, 0, 6):
        first, count = len(expected), -(-loads[expert] // tile)
        assert int(first_tile[expert]) == first
        expected += [[expert, min(tile, loads[expert] - tile * i), first, count] for i in range(count)]
    assert tiles[: int(tile_count)].tolist() == expected
    for expert, load in enumerate(loads):
        assert rank[ids == expert].tolist() == list(range(load))
