"""The MoE of a chunk on the GPU, on both FP8 roads and with every tile, against the plain op in float32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.moe import mixed, prefill
from antiphon.kernels.moe.chunk_norm import add_rms_norm_
from antiphon.kernels.moe.fp8_weights import Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.mixed import MixedWorkspace, RowExponents
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = 8
BOUND = 4e-2
EPS = 1e-5
ROADS = [
    *(("resident", tile) for tile in prefill.TILES),
    *(("widened", tile) for tile in mixed.TILES),
]


class Layer:
    """Random experts in every form."""

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
        self.fp8 = Fp8Experts.from_checkpoint(gate_up, self.gate_up_bias, down, self.down_bias)
        self.streamed = StreamedExperts.from_checkpoint(gate_up, self.gate_up_bias, down, self.down_bias)
        self.exponents = RowExponents.from_checkpoint(gate_up, down)

    def plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return reference.moe(
            *(x.float(), ids, weights.float(), self.gate_up, self.gate_up_bias.float()),
            *(self.down, self.down_bias.float()),
        )

    def part(self, first: int, count: int) -> Layer:
        """A rank's experts."""
        mine = slice(first, first + count)

        def matrix(whole: Fp8Matrix) -> Fp8Matrix:
            return Fp8Matrix(whole.values[mine].contiguous(), whole.scales[mine].contiguous(), 0)

        def bias(whole: Tensor) -> Tensor:
            return whole[mine].contiguous()

        part = object.__new__(Layer)
        gate_up_bias, down_bias = bias(self.gate_up_bias), bias(self.down_bias)
        part.fp8 = Fp8Experts(matrix(self.fp8.gate_up), gate_up_bias, matrix(self.fp8.down), down_bias)
        streamed, exponents = self.streamed, self.exponents
        part.streamed = StreamedExperts(bias(streamed.gate_up), gate_up_bias, bias(streamed.down), down_bias)
        part.exponents = RowExponents(bias(exponents.gate_up), bias(exponents.down), 0, 0)
        return part


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(2)
    return Layer()


@dataclass(frozen=True)
class Road:
    """One family of kernels with one size of tiles."""

    name: str
    tile: int

    def workspace(
        self, tokens: int, first: int = 0, experts: int | None = None
    ) -> Fp8Workspace | MixedWorkspace:
        """Poisoned."""
        device = torch.device("cuda")
        made: Fp8Workspace | MixedWorkspace
        if self.name == "resident":
            made = Fp8Workspace(tokens, EXPERTS, device, first, experts, self.tile)
        else:
            made = MixedWorkspace(tokens, EXPERTS, device, first, experts)
            made.token_scale.fill_(float("nan"))
        made.activations.fill_(0x7F)  # NaN
        made.hidden.fill_(0x7F)
        made.row_weight.fill_(float("nan"))
        made.rows.fill_(float("nan"))
        made.tiles.fill_(-(2**30))
        return made

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layer: Layer,
        workspace: Fp8Workspace | MixedWorkspace | None = None,
    ) -> Tensor:
        """The op, into a poisoned output."""
        workspace = self.workspace(x.shape[0]) if workspace is None else workspace
        return self.into(torch.full_like(x, float("nan")), x, ids, weights, layer, workspace)

    def into(
        self,
        out: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layer: Layer,
        workspace: Fp8Workspace | MixedWorkspace,
    ) -> Tensor:
        """The op and nothing else."""
        if isinstance(workspace, Fp8Workspace):
            return prefill.moe_fp8(x, ids, weights, layer.fp8, workspace, out)
        return mixed.moe_mixed(*(x, ids, weights, layer.streamed, layer.exponents, workspace, out, self.tile))

    def fused(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        layer: Layer,
        residual: Tensor,
        gain: Tensor,
        workspace: Fp8Workspace | MixedWorkspace | None = None,
    ) -> Tensor:
        """With the residual add and the next norm."""
        workspace = self.workspace(x.shape[0]) if workspace is None else workspace
        if isinstance(workspace, Fp8Workspace):
            return prefill.moe_add_rms_norm_(x, ids, weights, layer.fp8, workspace, residual, gain, EPS)
        return mixed.moe_add_rms_norm_(
            *(x, ids, weights, layer.streamed, layer.exponents, workspace, residual, gain, EPS, self.tile)
        )

    def rank(self, ids: Tensor, workspace: Fp8Workspace | MixedWorkspace) -> None:
        """Only the places of pairs."""
        if isinstance(workspace, Fp8Workspace):
            prefill.route(ids, workspace)
        else:
            mixed.route(ids, workspace, self.tile)


@pytest.fixture(params=ROADS, ids=[f"{name}-{tile}" for name, tile in ROADS])
def road(request: pytest.FixtureRequest) -> Road:
    return Road(*request.param)


def random_routing(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randn(tokens, EXPERTS, device="cuda").topk(4, dim=-1).indices
    return ids, torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).bfloat16()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 200, 511, 512, 513, 1030])
def test_moe_matches_the_plain_op(road: Road, layer: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    out = road.moe(x, ids, weights, layer)
    assert relative_error(out, layer.plain(x, ids, weights)) <= BOUND
    assert torch.equal(out, road.moe(x, ids, weights, layer))


@alone_and_beside_copies
@pytest.mark.parametrize("tokens", [20, 200, 1030])
def test_every_launch_is_the_same(road: Road, layer: Layer, tokens: int, beside: bool) -> None:
    """Tiles that are not full, an expert's tokens in one and in several, and more work than blocks."""
    torch.manual_seed(tokens)
    inputs = [(torch.randn(tokens, DIM, device="cuda").bfloat16(), *random_routing(tokens)) for _ in range(2)]
    workspace = road.workspace(tokens)

    def launch(turn: int, out: Tensor) -> None:
        road.into(out, *inputs[turn], layer, workspace)

    check_launches(launch, torch.full_like(inputs[0][0], float("nan")), beside=beside)


def test_every_launch_with_a_norm_is_the_same(road: Road, layer: Layer) -> None:
    torch.manual_seed(13)
    inputs = [(torch.randn(200, DIM, device="cuda").bfloat16(), *random_routing(200)) for _ in range(2)]
    residual, gain = (
        torch.randn(200, DIM, device="cuda").bfloat16(),
        torch.randn(DIM, device="cuda").bfloat16(),
    )
    workspace = road.workspace(200)

    def launch(turn: int, normed: Tensor, residual: Tensor) -> None:
        normed.copy_(road.fused(*inputs[turn], layer, residual, gain, workspace))

    check_launches(launch, torch.full_like(residual, float("nan")), residual)


def test_rounding_is_the_only_error(road: Road, layer: Layer) -> None:
    """Powers of two survive e4m3, so only the hidden state is rounded: the error halves or better."""
    x = (2.0 ** torch.randint(-3, 3, (90, DIM), device="cuda").float()).bfloat16()
    x = x * torch.where(torch.rand(90, DIM, device="cuda") < 0.5, -1.0, 1.0).bfloat16()
    x[:, ::128] = 448 / 64  # the peak of every 128 columns: a power-of-two factor
    ids, weights = random_routing(90)
    assert relative_error(road.moe(x, ids, weights, layer), layer.plain(x, ids, weights)) <= 0.7 * BOUND


@pytest.mark.parametrize("tokens", [1, 70, 600])
def test_all_tokens_to_the_same_experts_and_empty_ones(road: Road, layer: Layer, tokens: int) -> None:
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids = torch.tensor([[7, 0, 3, 5]], device="cuda").repeat(tokens, 1)
    weights = random_routing(tokens)[1]
    assert relative_error(road.moe(x, ids, weights, layer), layer.plain(x, ids, weights)) <= BOUND


@pytest.mark.parametrize("tile", mixed.TILES)
def test_every_load_of_a_tile(layer: Layer, tile: int) -> None:
    """A tile is multiplied by the narrowest product that holds its tokens: each number of them is tried."""
    torch.manual_seed(tile)
    for first in range(1, tile + 1, EXPERTS):
        loads = range(first, first + EXPERTS)
        ids = torch.full((loads[3] + loads[7], 4), -1, device="cuda")
        for expert, load in enumerate(loads):
            before = loads[expert - 4] if expert >= 4 else 0
            ids[before : before + load, expert % 4] = expert
        x = torch.randn(len(ids), DIM, device="cuda").bfloat16()
        weights = random_routing(len(ids))[1]
        out = Road("widened", tile).moe(x, ids, weights, layer)
        plain = layer.plain(x, ids.clamp(min=0), weights.masked_fill(ids < 0, 0.0))
        assert relative_error(out, plain) <= BOUND, loads


def test_nan_reaches_its_own_token_only(road: Road, layer: Layer) -> None:
    x = torch.randn(80, DIM, device="cuda").bfloat16()
    x[40, 100] = float("nan")
    ids, weights = random_routing(80)
    out = road.moe(x, ids, weights, layer)
    assert out[40].isnan().all()
    assert not out[[*range(40), *range(41, 80)]].isnan().any()


def test_padding_tokens_yield_zeros(road: Road, layer: Layer) -> None:
    x = torch.randn(20, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(20)
    ids[15:] = -1
    out = road.moe(x, ids, weights, layer)
    assert not out[15:].any()
    assert relative_error(out[:15], layer.plain(x[:15], ids[:15], weights[:15])) <= BOUND


def test_chunks_of_nothing_but_padding_leave_the_next_one_alone(road: Road, layer: Layer) -> None:
    torch.manual_seed(8)
    x = torch.randn(70, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(70)
    workspace = road.workspace(70)
    for _ in range(2):
        assert not road.moe(x, torch.full_like(ids, -1), weights, layer, workspace).any()
    assert torch.equal(road.moe(x, ids, weights, layer, workspace), road.moe(x, ids, weights, layer))


def test_ranks_of_experts_add_up(road: Road, layer: Layer) -> None:
    x = torch.randn(300, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(300)
    total = torch.zeros(300, DIM, device="cuda")
    for first in (0, 4):
        workspace = road.workspace(300, first, 4)
        total += road.moe(x, ids, weights, layer.part(first, 4), workspace).float()
    assert relative_error(total, layer.plain(x, ids, weights)) <= BOUND


@pytest.mark.parametrize("tokens", [1, 33, 4000, 20000])
def test_ranks_and_tiles(road: Road, tokens: int) -> None:
    ids = random_routing(tokens)[0]
    workspace = road.workspace(tokens)
    for _ in range(2):
        road.rank(ids, workspace)
    flat, tile = ids.flatten(), road.tile
    expected = torch.empty_like(flat)
    tiles = []
    loads = flat.bincount(minlength=EXPERTS).tolist()
    for expert in sorted(range(EXPERTS), key=lambda each: -loads[each]):
        mine = (flat == expert).nonzero().flatten()
        expected[mine] = torch.arange(len(mine), device=flat.device)
        count, first = -(-len(mine) // tile), len(tiles)
        tiles += [[expert, min(tile, len(mine) - tile * i), first, count] for i in range(count)]
    assert torch.equal(workspace.rank.long(), expected)
    assert workspace.tiles[: int(workspace.tile_count)].tolist() == tiles


def test_foreign_tensors_are_refused(road: Road, layer: Layer) -> None:
    workspace = road.workspace(4)
    ids, weights = random_routing(4)
    with pytest.raises(ValueError, match="x is"):
        road.moe(torch.randn(4, DIM, device="cuda"), ids, weights, layer, workspace)
    with pytest.raises(ValueError, match="5 tokens"):
        road.moe(torch.randn(5, DIM, device="cuda").bfloat16(), ids, weights, layer, workspace)


def test_the_fused_norm_equals_its_parts(road: Road, layer: Layer) -> None:
    torch.manual_seed(12)
    x, residual = (torch.randn(700, DIM, device="cuda").bfloat16() for _ in range(2))
    ids, weights = random_routing(700)
    ids[690:] = -1
    gain = torch.randn(DIM, device="cuda").bfloat16()
    moe = road.moe(x, ids, weights, layer)
    expected, ours, again = residual + moe, residual.clone(), residual.clone()
    normed = road.fused(x, ids, weights, layer, ours, gain)
    assert torch.equal(ours, expected)
    assert relative_error(normed, reference.rms_norm(expected.float(), gain.float(), EPS)) <= 3e-3
    assert torch.equal(add_rms_norm_(moe, again, gain, EPS), normed)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("tile", mixed.TILES)
def test_outliers_leave_the_rest_of_their_token_in_place(tile: int) -> None:
    """One scale a token: beside a value 3,000 times their size the others keep e4m3's relative error."""
    torch.manual_seed(11)
    layer = Layer(unread_column=77)  # so that only the scale feels the outlier
    x = torch.randn(64, DIM, device="cuda").bfloat16()
    x[:, 77] = 3000.0
    ids, weights = random_routing(64)
    out = Road("widened", tile).moe(x, ids, weights, layer)
    assert relative_error(out, layer.plain(x, ids, weights)) <= BOUND
