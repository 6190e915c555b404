"""The FP8 MoE on the GPU against the plain op in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.moe.fp8_weights import Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.prefill import Fp8Workspace, moe_fp8, route
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = 8
BOUND = 4e-2


class Layer:
    """Random experts in both forms."""

    def __init__(self) -> None:
        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8, device="cuda")
            scales = torch.randint(116, 121, (EXPERTS, rows, 90), device="cuda")
            return ExpertMatrix(blocks, scales.to(torch.uint8))

        gate_up, down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * DIM, device="cuda").bfloat16()
        self.down_bias = torch.randn(EXPERTS, DIM, device="cuda").bfloat16()
        self.gate_up, self.down = dequantize_mxfp4(gate_up), dequantize_mxfp4(down)
        self.experts = Fp8Experts.from_checkpoint(gate_up, self.gate_up_bias, down, self.down_bias)

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return reference.moe(
            x.float(),
            ids,
            weights.float(),
            self.gate_up,
            self.gate_up_bias.float(),
            self.down,
            self.down_bias.float(),
        )


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(2)
    return Layer()


def random_routing(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randn(tokens, EXPERTS, device="cuda").topk(4, dim=-1).indices
    return ids, torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).bfloat16()


def run(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    workspace = Fp8Workspace(x.shape[0], EXPERTS, x.device)
    workspace.activations.fill_(0x7F)  # NaN
    workspace.hidden.fill_(0x7F)
    workspace.rows.fill_(float("nan"))
    workspace.tiles.fill_(-(2**30))
    return moe_fp8(x, ids, weights, layer.experts, workspace, torch.full_like(x, float("nan")))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 200, 511, 512, 513, 1030])
def test_moe_matches_the_plain_op(layer: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    out = run(x, ids, weights, layer)
    assert relative_error(out, layer.plain(x, ids, weights)) <= BOUND
    assert torch.equal(out, run(x, ids, weights, layer))


def test_rounding_is_the_only_error(layer: Layer) -> None:
    """Powers of two survive e4m3, so only the hidden state is rounded: the error halves or better."""
    x = (2.0 ** torch.randint(-3, 3, (90, DIM), device="cuda").float()).bfloat16()
    x = x * torch.where(torch.rand(90, DIM, device="cuda") < 0.5, -1.0, 1.0).bfloat16()
    x[:, ::128] = 448 / 64  # the peak of every 128 columns: a power-of-two factor
    ids, weights = random_routing(90)
    assert relative_error(run(x, ids, weights, layer), layer.plain(x, ids, weights)) <= 0.7 * BOUND


@pytest.mark.parametrize("tokens", [1, 70, 600])
def test_all_tokens_to_the_same_experts_and_empty_ones(layer: Layer, tokens: int) -> None:
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids = torch.tensor([[7, 0, 3, 5]], device="cuda").repeat(tokens, 1)
    weights = random_routing(tokens)[1]
    assert relative_error(run(x, ids, weights, layer), layer.plain(x, ids, weights)) <= BOUND


def test_nan_reaches_its_own_token_only(layer: Layer) -> None:
    x = torch.randn(80, DIM, device="cuda").bfloat16()
    x[40, 100] = float("nan")
    ids, weights = random_routing(80)
    out = run(x, ids, weights, layer)
    assert out[40].isnan().all()
    assert not out[[*range(40), *range(41, 80)]].isnan().any()


def test_padding_tokens_yield_zeros(layer: Layer) -> None:
    x = torch.randn(20, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(20)
    ids[15:] = -1
    out = run(x, ids, weights, layer)
    assert not out[15:].any()
    assert relative_error(out[:15], layer.plain(x[:15], ids[:15], weights[:15])) <= BOUND


def test_ranks_of_experts_add_up(layer: Layer) -> None:
    x = torch.randn(300, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(300)
    total = torch.zeros(300, DIM, device="cuda")

    def part(matrix: Fp8Matrix, first: int) -> Fp8Matrix:
        rows = slice(first, first + 4)
        return Fp8Matrix(matrix.values[rows].contiguous(), matrix.scales[rows].contiguous(), 0)

    for first in (0, 4):
        experts = Fp8Experts(
            part(layer.experts.gate_up, first),
            layer.experts.gate_up_bias[first : first + 4].contiguous(),
            part(layer.experts.down, first),
            layer.experts.down_bias[first : first + 4].contiguous(),
        )
        workspace = Fp8Workspace(300, EXPERTS, x.device, first_expert=first, experts=4)
        total += moe_fp8(x, ids, weights, experts, workspace).float()
    assert relative_error(total, layer.plain(x, ids, weights)) <= BOUND


@pytest.mark.parametrize("tokens", [1, 33, 4000, 20000])
def test_ranks_and_tiles(tokens: int) -> None:
    ids = random_routing(tokens)[0]
    workspace = Fp8Workspace(tokens, EXPERTS, ids.device)
    for _ in range(2):
        route(ids, workspace)
    flat = ids.flatten()
    expected = torch.empty_like(flat)
    tiles = []
    for expert in range(EXPERTS):
        mine = (flat == expert).nonzero().flatten()
        expected[mine] = torch.arange(len(mine), device=flat.device)
        count, first = -(-len(mine) // 256), len(tiles)
        tiles += [[expert, min(256, len(mine) - 256 * i), first, count] for i in range(count)]
    assert torch.equal(workspace.rank.long(), expected)
    assert workspace.tiles[: int(workspace.tile_count)].tolist() == tiles


def test_foreign_tensors_are_refused(layer: Layer) -> None:
    workspace = Fp8Workspace(4, EXPERTS, torch.device("cuda"))
    ids, weights = random_routing(4)
    with pytest.raises(ValueError, match="x is"):
        moe_fp8(torch.randn(4, DIM, device="cuda"), ids, weights, layer.experts, workspace)
    with pytest.raises(ValueError, match="5 tokens"):
        moe_fp8(torch.randn(5, DIM, device="cuda").bfloat16(), ids, weights, layer.experts, workspace)
