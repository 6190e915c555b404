"""The MoE of a chunk on the GPU, MXFP4 weights widened in registers, against the plain op in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.moe.chunk_norm import add_rms_norm_
from antiphon.kernels.moe.mixed import (
    MixedWorkspace,
    RowExponents,
    moe_add_rms_norm_,
    moe_mixed,
    route,
)
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = 8
BOUND = 4e-2


class Layer:
    """Random experts in both forms."""

    def __init__(self, unread_column: int | None = None) -> None:
        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (EXPERTS, rows, 90, 16), dtype=torch.uint8, device="cuda")
            if unread_column is not None and rows == 2 * DIM:
                blocks.flatten(-2)[..., unread_column // 2] = 0
            scales = torch.randint(116, 121, (EXPERTS, rows, 90), device="cuda")
            return ExpertMatrix(blocks, scales.to(torch.uint8))

        gate_up, down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(EXPERTS, 2 * DIM, device="cuda").bfloat16()
        self.down_bias = torch.randn(EXPERTS, DIM, device="cuda").bfloat16()
        self.gate_up, self.down = dequantize_mxfp4(gate_up), dequantize_mxfp4(down)
        self.experts = StreamedExperts.from_checkpoint(gate_up, self.gate_up_bias, down, self.down_bias)
        self.exponents = RowExponents.from_checkpoint(gate_up, down)

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


def run(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer, tile: int | None = None) -> Tensor:
    workspace = MixedWorkspace(x.shape[0], EXPERTS, x.device)
    workspace.activations.fill_(0x7F)  # NaN
    workspace.token_scale.fill_(float("nan"))
    workspace.row_weight.fill_(float("nan"))
    workspace.hidden.fill_(0x7F)
    workspace.rows.fill_(float("nan"))
    workspace.tiles.fill_(-(2**30))
    out = torch.full_like(x, float("nan"))
    return moe_mixed(x, ids, weights, layer.experts, layer.exponents, workspace, out, tile)


@pytest.mark.parametrize("tile", [32, 48, 64, 192, 256])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 200, 511, 512, 513, 1030])
def test_moe_matches_the_plain_op(layer: Layer, tokens: int, tile: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    out = run(x, ids, weights, layer, tile)
    assert relative_error(out, layer.plain(x, ids, weights)) <= BOUND
    assert torch.equal(out, run(x, ids, weights, layer, tile))


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

    for first in (0, 4):
        mine = slice(first, first + 4)
        experts = StreamedExperts(
            layer.experts.gate_up[mine].contiguous(),
            layer.experts.gate_up_bias[mine].contiguous(),
            layer.experts.down[mine].contiguous(),
            layer.experts.down_bias[mine].contiguous(),
        )
        exponents = RowExponents(
            layer.exponents.gate_up[mine].contiguous(), layer.exponents.down[mine].contiguous(), 0, 0
        )
        workspace = MixedWorkspace(300, EXPERTS, x.device, first_expert=first, experts=4)
        total += moe_mixed(x, ids, weights, experts, exponents, workspace).float()
    assert relative_error(total, layer.plain(x, ids, weights)) <= BOUND


@pytest.mark.parametrize("tile", [48, 256])
@pytest.mark.parametrize("tokens", [1, 33, 4000, 20000])
def test_ranks_and_tiles(tokens: int, tile: int) -> None:
    ids = random_routing(tokens)[0]
    workspace = MixedWorkspace(tokens, EXPERTS, ids.device)
    for _ in range(2):
        route(ids, workspace, tile)
    flat = ids.flatten()
    expected = torch.empty_like(flat)
    tiles = []
    for expert in range(EXPERTS):
        mine = (flat == expert).nonzero().flatten()
        expected[mine] = torch.arange(len(mine), device=flat.device)
        count, first = -(-len(mine) // tile), len(tiles)
        tiles += [[expert, min(tile, len(mine) - tile * i), first, count] for i in range(count)]
    assert torch.equal(workspace.rank.long(), expected)
    assert workspace.tiles[: int(workspace.tile_count)].tolist() == tiles


def test_foreign_tensors_are_refused(layer: Layer) -> None:
    workspace = MixedWorkspace(4, EXPERTS, torch.device("cuda"))
    ids, weights = random_routing(4)
    with pytest.raises(ValueError, match="x is"):
        moe_mixed(torch.randn(4, DIM, device="cuda"), ids, weights, layer.experts, layer.exponents, workspace)
    with pytest.raises(ValueError, match="5 tokens"):
        moe_mixed(
            torch.randn(5, DIM, device="cuda").bfloat16(),
            ids,
            weights,
            layer.experts,
            layer.exponents,
            workspace,
        )


def test_the_fused_norm_equals_its_parts(layer: Layer) -> None:
    torch.manual_seed(12)
    x, residual = (torch.randn(700, DIM, device="cuda").bfloat16() for _ in range(2))
    ids, weights = random_routing(700)
    ids[690:] = -1
    gain = torch.randn(DIM, device="cuda").bfloat16()
    workspace = MixedWorkspace(700, EXPERTS, x.device)
    moe = moe_mixed(x, ids, weights, layer.experts, layer.exponents, workspace)
    expected, ours, again = residual + moe, residual.clone(), residual.clone()
    normed = moe_add_rms_norm_(
        *(x, ids, weights, layer.experts, layer.exponents, workspace, ours, gain), eps=1e-5
    )
    assert torch.equal(ours, expected)
    assert relative_error(normed, reference.rms_norm(expected.float(), gain.float(), 1e-5)) <= 3e-3
    assert torch.equal(add_rms_norm_(moe, again, gain, 1e-5), normed)
    assert torch.equal(again, expected)


def test_outliers_leave_the_rest_of_their_token_in_place() -> None:
    """One scale a token: beside a value 3,000 times their size the others keep e4m3's relative error."""
    torch.manual_seed(11)
    layer = Layer(unread_column=77)  # so that only the scale feels the outlier
    x = torch.randn(64, DIM, device="cuda").bfloat16()
    x[:, 77] = 3000.0
    ids, weights = random_routing(64)
    assert relative_error(run(x, ids, weights, layer), layer.plain(x, ids, weights)) <= BOUND
