"""The streamed MoE and its routing on the GPU against the plain ops in float32."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels import reference
from antiphon.kernels.moe.decode import (
    TOKEN_TILES,
    LaunchPlan,
    MoeWorkspace,
    Routing,
    group,
    moe_add_rms_norm,
    moe_streamed,
    plan_launch,
    route_grouped,
)
from antiphon.kernels.moe.streamed import DIM, StreamedExperts
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = 8
BOUND = 5e-3


class Layer:
    """Random experts in both forms; ``gain`` moves the block scales, and with them the clamps' use."""

    def __init__(self, experts: int = EXPERTS, gain: int = 0) -> None:
        def matrix(rows: int) -> ExpertMatrix:
            blocks = torch.randint(0, 256, (experts, rows, 90, 16), dtype=torch.uint8, device="cuda")
            scales = torch.randint(116 + gain, 122 + gain, (experts, rows, 90), device="cuda")
            return ExpertMatrix(blocks, scales.to(torch.uint8))

        gate_up, down = matrix(2 * DIM), matrix(DIM)
        self.gate_up_bias = torch.randn(experts, 2 * DIM, device="cuda").bfloat16()
        self.down_bias = torch.randn(experts, DIM, device="cuda").bfloat16()
        self.gate_up, self.down = dequantize_mxfp4(gate_up), dequantize_mxfp4(down)
        self.streamed = StreamedExperts.from_checkpoint(gate_up, self.gate_up_bias, down, self.down_bias)

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
    torch.manual_seed(1)
    return Layer()


def random_routing(tokens: int, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    logits = torch.randn(tokens, experts, device="cuda")
    ids = logits.topk(4, dim=-1).indices
    return ids, torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).bfloat16()


def poison(workspace: MoeWorkspace) -> None:
    workspace.activations.fill_(0x7F)  # NaN in e4m3
    workspace.hidden.fill_(0x7F)
    workspace.scale.fill_(float("nan"))
    workspace.partial.fill_(float("nan"))
    workspace.order.fill_(-(2**30))
    workspace.tiles.fill_(-(2**30))
    workspace.ready.fill_(2**20)


def run(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer, plan: LaunchPlan | None = None) -> Tensor:
    workspace = MoeWorkspace(x.shape[0], layer.streamed.experts, x.device)
    poison(workspace)
    routing = group(x, ids, weights, workspace, plan)
    return moe_streamed(routing, layer.streamed, workspace, torch.full_like(x, float("nan")))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 129, 256])
def test_moe_matches_the_plain_op(layer: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    out = run(x, ids, weights, layer)
    assert relative_error(out, layer.plain(x, ids, weights)) <= BOUND
    assert torch.equal(out, run(x, ids, weights, layer))


@pytest.mark.parametrize("token_tile", [4, 8, 16, 24])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [1, 13, 70])
def test_every_plan(layer: Layer, token_tile: int, overlap: bool, tokens: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    plan = LaunchPlan(token_tile, overlap)
    assert relative_error(run(x, ids, weights, layer, plan), layer.plain(x, ids, weights)) <= BOUND


@pytest.mark.parametrize("token_tile", TOKEN_TILES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [8, 70])
def test_every_launch_is_the_same(layer: Layer, token_tile: int, overlap: bool, tokens: int) -> None:
    """Back to back. Where two tiles fit in shared memory, a block gathers one while it multiplies the other.

    Loads of weights that had to wait for the gathering once read what had replaced the weights by then: in
    every second launch of 70 tokens in tiles of 8.
    """
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(tokens)
    workspace, plan = MoeWorkspace(tokens, EXPERTS, x.device), LaunchPlan(token_tile, overlap)
    outs = torch.full((100, tokens, DIM), float("nan"), device="cuda").bfloat16()
    for out in outs:
        moe_streamed(group(x, ids, weights, workspace, plan), layer.streamed, workspace, out)
    apart = (outs != outs[0]).flatten(1).any(-1).nonzero().flatten()
    assert not len(apart), (len(apart), apart[:8].tolist())


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_all_tokens_to_the_same_experts_and_empty_ones(layer: Layer, tokens: int) -> None:
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    ids = torch.tensor([[7, 0, 3, 5]], device="cuda").repeat(tokens, 1)
    weights = random_routing(tokens)[1]
    assert relative_error(run(x, ids, weights, layer), layer.plain(x, ids, weights)) <= BOUND


def test_values_beyond_the_clamps() -> None:
    torch.manual_seed(9)
    layer = Layer(gain=3)
    x = (torch.randn(6, DIM, device="cuda") * torch.logspace(-3, 2, 6, device="cuda")[:, None]).bfloat16()
    ids, weights = random_routing(6)
    plain = layer.plain(x, ids, weights)
    out = run(x, ids, weights, layer)
    assert max(relative_error(out[token], plain[token]) for token in range(6)) <= BOUND


@pytest.mark.parametrize(("token_tile", "bound"), [(4, BOUND), (8, BOUND), (16, 1e-2), (24, 1e-2)])
def test_an_outlier_channel(token_tile: int, bound: float) -> None:
    """Small activations beside one of 30,000 times their size, all gates near the edges of their clamps.

    They are off by up to 2^-22 of the outlier where the low parts have columns of their own, and by 2^-17
    elsewhere, which is a quarter of them. A normed state's largest is at most 54 times its root mean square:
    what stands so far below it adds next to nothing to its sums.
    """
    torch.manual_seed(9)
    layer = Layer(gain=3)
    x = (torch.randn(1, DIM, device="cuda") * 0.1).bfloat16()
    x[0, 77] = 3000.0
    ids, weights = random_routing(1)
    out = run(x, ids, weights, layer, LaunchPlan(token_tile))
    error = relative_error(out, layer.plain(x, ids, weights))
    print(f"tile {token_tile}: {error:.1e}")
    assert error <= bound


def test_nan_reaches_its_own_token_only(layer: Layer) -> None:
    x = torch.randn(6, DIM, device="cuda").bfloat16()
    x[4, 100] = float("nan")
    ids, weights = random_routing(6)
    out = run(x, ids, weights, layer)
    assert out[4].isnan().all()
    assert not out[[0, 1, 2, 3, 5]].isnan().any()


def test_padding_tokens_yield_zeros(layer: Layer) -> None:
    x = torch.randn(5, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(5)
    ids[3:] = -1
    out = run(x, ids, weights, layer)
    assert not out[3:].any()
    assert relative_error(out[:3], layer.plain(x[:3], ids[:3], weights[:3])) <= BOUND


def test_ranks_of_experts_add_up(layer: Layer) -> None:
    x = torch.randn(11, DIM, device="cuda").bfloat16()
    ids, weights = random_routing(11)
    total = torch.zeros(11, DIM, device="cuda")
    for first in (0, 4):
        part = StreamedExperts(
            *(
                tensor[first : first + 4].contiguous()
                for tensor in (
                    layer.streamed.gate_up,
                    layer.streamed.gate_up_bias,
                    layer.streamed.down,
                    layer.streamed.down_bias,
                )
            )
        )
        workspace = MoeWorkspace(16, EXPERTS, x.device, first_expert=first, experts=4)
        poison(workspace)
        total += moe_streamed(group(x, ids, weights, workspace), part, workspace).float()
    assert relative_error(total, layer.plain(x, ids, weights)) <= BOUND


def check_grouping(routing: Routing, token_tile: int) -> None:
    ids = routing.expert_ids.flatten()
    pairs = ids.numel()
    order = routing.order[:pairs].long()
    expected = torch.argsort(ids, stable=True)
    assert torch.equal(order, expected)
    tiles = routing.tiles[: int(routing.tile_count)].tolist()
    counts = torch.bincount(ids).tolist()
    built, slot = [], 0
    for expert, count in enumerate(counts):
        for begin in range(0, count, token_tile):
            built.append([expert, slot + begin, min(token_tile, count - begin), 0])
        slot += count
    assert tiles == built


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 33, 128, 512])
def test_router_matches_the_plain_op(experts: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16()
    weight = (torch.randn(experts, DIM, device="cuda") / 54).bfloat16()
    bias = torch.randn(experts, device="cuda").bfloat16()
    workspace = MoeWorkspace(tokens, experts, x.device)
    poison(workspace)
    for _ in range(2):  # the second launch shows that the first left the ticket as it found it
        routing = route_grouped(x, weight, bias, workspace)
    logits = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    ids, weights = reference.route(x, weight, bias, 4)
    best = logits.sort(dim=-1, descending=True).values
    clear = ((best[:, :4] - best[:, 1:5]) > 1e-4).all(-1)  # a tie within rounding may fall either way
    assert int(clear.sum()) >= 0.9 * tokens
    assert torch.equal(routing.expert_ids[clear], ids[clear])
    assert relative_error(routing.expert_weights[clear], weights[clear]) <= BOUND
    check_grouping(routing, routing.plan.token_tile)


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_router_norms_the_residual_stream(layer: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, DIM, device="cuda").bfloat16() * 5
    norm = torch.rand(DIM, device="cuda").bfloat16() + 0.5
    weight = (torch.randn(EXPERTS, DIM, device="cuda") / 54).bfloat16()
    bias = torch.randn(EXPERTS, device="cuda").bfloat16()
    workspace = MoeWorkspace(tokens, EXPERTS, x.device)
    poison(workspace)
    routing = route_grouped(x, weight, bias, workspace, norm_weight=norm, eps=1e-5)
    normed = reference.rms_norm(x.float(), norm.float(), 1e-5)
    ids, weights = reference.route(normed, weight.float(), bias.float(), 4)
    assert torch.equal(routing.expert_ids, ids)
    assert relative_error(routing.expert_weights, weights) <= BOUND
    out = moe_streamed(routing, layer.streamed, workspace)
    plain = layer.plain(normed.bfloat16(), ids, weights.bfloat16())
    assert relative_error(out, plain) <= BOUND


@alone_and_beside_copies
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 33, 200])
def test_every_layers_half_is_the_same(layer: Layer, tokens: int, overlap: bool, beside: bool) -> None:
    """Router and experts with both norms, as a decode step launches them."""
    torch.manual_seed(tokens)
    x = torch.randn(2, tokens, DIM, device="cuda").bfloat16()
    norms = torch.rand(2, DIM, device="cuda").bfloat16() + 0.5
    weight = (torch.randn(EXPERTS, DIM, device="cuda") / 54).bfloat16()
    bias = torch.randn(EXPERTS, device="cuda").bfloat16()
    workspace = MoeWorkspace(tokens, EXPERTS, x.device)
    plan = LaunchPlan(plan_launch(tokens, EXPERTS).token_tile, overlap)

    def launch(turn: int, normed: Tensor, residual: Tensor) -> None:
        routing = route_grouped(x[turn], weight, bias, workspace, plan, norms[0], 1e-5)
        moe_add_rms_norm(routing, layer.streamed, workspace, residual, norms[1], 1e-5, normed)

    check_launches(launch, torch.full_like(x[0], float("nan")), x[0], beside=beside)


def test_equal_logits_go_to_the_lowest_ids() -> None:
    x = torch.randn(3, DIM, device="cuda").bfloat16()
    weight = torch.zeros(32, DIM, device="cuda").bfloat16()
    bias = torch.zeros(32, device="cuda").bfloat16()
    bias[9] = 1.0
    routing = route_grouped(x, weight, bias, MoeWorkspace(3, 32, x.device))
    assert routing.expert_ids.tolist() == [[9, 0, 1, 2]] * 3


def test_fused_residual_and_norm(layer: Layer) -> None:
    torch.manual_seed(4)
    x, residual = (torch.randn(10, DIM, device="cuda").bfloat16() for _ in range(2))
    norm = torch.rand(DIM, device="cuda").bfloat16() + 0.5
    ids, weights = random_routing(10)
    workspace = MoeWorkspace(10, EXPERTS, x.device)
    moe = moe_streamed(group(x, ids, weights, workspace), layer.streamed, workspace)
    expected, total = reference.add_rms_norm(moe, residual, norm, 1e-5)
    routing = group(x, ids, weights, workspace)
    out = moe_add_rms_norm(routing, layer.streamed, workspace, residual, norm, 1e-5)
    assert torch.equal(residual, total)
    assert relative_error(out, expected) <= 3e-3


def test_too_many_tokens_and_foreign_tensors_are_refused(layer: Layer) -> None:
    workspace = MoeWorkspace(4, EXPERTS, torch.device("cuda"))
    x = torch.randn(5, DIM, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="5 tokens"):
        group(x, *random_routing(5), workspace)
    ids, weights = random_routing(4)
    with pytest.raises(ValueError, match="x is"):
        group(x[:4].float(), ids, weights, workspace)
    routing = group(x[:4], ids, weights, workspace)
    with pytest.raises(ValueError, match="out is"):
        moe_streamed(routing, layer.streamed, workspace, x)
