"""The streamed MoE's CUDA kernels, thread by thread on the host, against the plain ops in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.decode import TOKEN_TILES, max_tiles
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

EXPERTS, BLOCKS, EPS = 5, 2, 1e-5
SOURCES = ["mxfp4_stream.cu", "routing.cu", "combine.cu", "split_tokens.cu"]


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"moe/csrc/{name}" for name in SOURCES])


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


class Layer:
    def __init__(self) -> None:
        torch.manual_seed(0)

        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8)
            return ExpertMatrix(blocks, torch.randint(117, 121, (EXPERTS, rows, 90), dtype=torch.uint8))

        self.gate_up, self.down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * DIM).bfloat16()
        self.down_bias = torch.randn(EXPERTS, DIM).bfloat16()
        self.streamed = StreamedExperts.from_checkpoint(
            self.gate_up, self.gate_up_bias, self.down, self.down_bias
        )
        self.router = (torch.randn(EXPERTS, DIM) / 54).bfloat16()
        self.router_bias = torch.randn(EXPERTS).bfloat16()

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return reference.moe(
            *(x.float(), ids, weights.float(), dequantize_mxfp4(self.gate_up), self.gate_up_bias.float()),
            *(dequantize_mxfp4(self.down), self.down_bias.float()),
        )


class Buffers:
    """What ``MoeWorkspace`` holds, poisoned."""

    def __init__(self, tokens: int, token_tile: int) -> None:
        pairs = tokens * 4
        self.tokens, self.tile = tokens, token_tile
        self.limit = max_tiles(pairs, EXPERTS, token_tile)
        self.ids = torch.full((tokens, 4), -9)
        self.weights = torch.full((tokens, 4), float("nan")).bfloat16()
        self.order = torch.full((pairs,), -(2**30), dtype=torch.int32)
        self.tiles = torch.full((self.limit, 4), -(2**30), dtype=torch.int32)
        self.tile_count = torch.zeros(1, dtype=torch.int32)
        self.ready = torch.full((self.limit,), 1 << 20, dtype=torch.int32)
        self.logits = torch.full((tokens, EXPERTS), float("nan"))
        self.tickets = torch.zeros(1 + tokens, dtype=torch.int32)
        self.activations = torch.full((tokens, 2 * DIM), 0x7F, dtype=torch.uint8)
        self.scale = torch.full((tokens,), float("nan"))
        self.hidden = torch.full((self.limit * token_tile * 2 * DIM,), 0x7F, dtype=torch.uint8)
        self.partial = torch.full((pairs, DIM), float("nan"))

    def route(self, library: Any, x: Tensor, layer: Layer, norm: Tensor | None) -> None:
        library.call(
            "moe_route",
            *(x, norm, EPS, layer.router, layer.router_bias, self.logits, self.ids, self.weights),
            *(self.activations, self.scale, self.tickets, self.tokens, EXPERTS, self.order, self.tiles),
            *(self.tile_count, self.ready, 0, EXPERTS, self.tile, 0),
        )

    def group(self, library: Any, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.ids, self.weights = ids, weights
        library.call(
            "moe_group",
            *(ids, ids.numel(), self.order, self.tiles, self.tile_count, self.ready),
            *(0, EXPERTS, self.tile, 0),
        )
        library.call("moe_split", x, self.activations, self.scale, self.tokens, self.tile, 0)

    def run(self, library: Any, layer: Layer, blocks: int = BLOCKS) -> None:
        experts = layer.streamed
        library.call(
            "moe_experts",
            *(experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias, self.activations),
            *(self.scale, self.order, self.tiles, self.tile_count, self.ready, self.hidden, self.weights),
            *(self.partial, self.limit, self.tile, blocks, 0),
        )

    def combine(self, library: Any) -> Tensor:
        out = torch.full((self.tokens, DIM), float("nan")).bfloat16()
        library.call("moe_combine", self.partial, self.ids, out, self.tokens, 0, EXPERTS, 0)
        return out


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def split_values(buffers: Buffers, low_factor: float) -> Tensor:
    """What the split activations stand for, [T, 2880] float64."""
    parts = buffers.activations.view(torch.float8_e4m3fn).double().view(-1, DIM // 16, 2, 16)
    values = (parts[:, :, 0] + parts[:, :, 1] / low_factor).reshape(-1, DIM)
    return values * buffers.scale.double()[:, None] / 64


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_one_launch_norms_routes_groups_and_splits(library: Any, layer: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, DIM) * torch.logspace(-2, 2, tokens)[:, None]).bfloat16()
    norm = torch.rand(DIM).bfloat16() + 0.5
    buffers = Buffers(tokens, 8)
    for _ in range(2):  # the second launch shows that the first left the tickets as it found them
        buffers.route(library, x, layer, norm)
    normed = reference.rms_norm(x, norm, EPS)
    exact = reference.rms_norm(x.float(), norm.float(), EPS)
    ids, weights = reference.route(exact, layer.router.float(), layer.router_bias.float(), 4)
    assert torch.equal(buffers.ids, ids)
    assert error(buffers.weights, weights) <= 3e-3
    assert error(split_values(buffers, 32.0), normed) <= 2e-4  # but for sums taken in another order
    order = torch.argsort(ids.flatten(), stable=True)
    assert torch.equal(buffers.order.long(), order)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    built, slot = [], 0
    for expert, count in enumerate(counts):
        for begin in range(0, count, 8):
            built.append([expert, slot + begin, min(8, count - begin), 0])
        slot += count
    assert buffers.tiles[: int(buffers.tile_count)].tolist() == built
    assert not buffers.ready[: len(built)].any()


def test_split_is_exact_and_keeps_what_stands_beside_an_outlier(library: Any) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, DIM).bfloat16()
    x[1, 77] = 3000.0
    ids, weights = torch.arange(4).repeat(2, 1), torch.ones(2, 4).bfloat16()
    small = torch.arange(DIM) != 77
    for tile, low_factor in ((8, 32.0), (16, 1.0)):
        buffers = Buffers(2, tile)
        buffers.group(library, x, ids, weights)
        values = split_values(buffers, low_factor)
        assert error(values[0], x[0]) <= 2.0**-12
        assert float(values[1, 77]) == float(x[1, 77])
        # A step of the low part is 2^-9 / low_factor where the outlier is 2^7 and more: at most half of one.
        bound = float(x[1, 77]) / 128 * 2.0**-10 / low_factor
        assert (values[1, small] - x[1, small].double()).abs().max() <= bound


@pytest.mark.parametrize(("tokens", "token_tile"), [(2, 4), (5, 8)])
def test_both_projections_in_one_launch(library: Any, layer: Layer, tokens: int, token_tile: int) -> None:
    torch.manual_seed(tokens)
    assert token_tile in TOKEN_TILES
    x = torch.randn(tokens, DIM).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(tokens)])
    weights = torch.softmax(torch.randn(tokens, 4), -1).bfloat16()
    buffers = Buffers(tokens, token_tile)
    buffers.group(library, x, ids, weights)
    buffers.run(library, layer)
    assert error(buffers.combine(library), layer.plain(x, ids, weights)) <= 4e-3


def test_residual_and_norm_behind_the_experts(library: Any) -> None:
    torch.manual_seed(2)
    partial, residual = torch.randn(8, DIM), torch.randn(2, DIM).bfloat16()
    partial[5] = float("nan")  # of another rank's expert
    norm = torch.rand(DIM).bfloat16() + 0.5
    ids = torch.tensor([[0, 1, 2, 3], [4, 9, 0, 1]])
    out, total = torch.full((2, 2, DIM), float("nan")).bfloat16()
    library.call("moe_combine_norm", partial, ids, residual, norm, out, total, EPS, 2, 0, EXPERTS, 0)
    sums = partial.nan_to_num().view(2, 4, DIM).sum(1).bfloat16()
    expected, expected_total = reference.add_rms_norm(sums, residual, norm, EPS)
    assert error(total, expected_total) <= 3e-3
    assert error(out, expected) <= 4e-3


def test_more_blocks_than_the_device_holds_are_refused_since_they_would_wait_for_ever(
    library: Any, layer: Layer
) -> None:
    buffers = Buffers(1, 8)
    for blocks in (0, 133):
        with pytest.raises(AssertionError, match="moe_experts refused the launch: 720"):
            buffers.run(library, layer, blocks)
