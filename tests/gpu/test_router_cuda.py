"""The routers of chunks and of decode steps on the GPU, where logits are nearly equal."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe import mixed, prefill
from antiphon.kernels.moe.chunk_route import RouteScratch, route_ranked
from antiphon.kernels.moe.decode import MoeWorkspace, route_grouped
from antiphon.kernels.moe.mixed import MixedWorkspace
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.router import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ranking(
    tokens: int, experts: int, held: range | None = None, resident: bool = False
) -> tuple[MixedWorkspace | Fp8Workspace, RouteScratch]:
    """Poisoned buffers of the one launch, of a rank that holds some experts or all."""
    held, device = range(experts) if held is None else held, torch.device("cuda")
    kind = Fp8Workspace if resident else MixedWorkspace
    buffers = kind(tokens, experts, device, held.start, len(held))
    buffers.rows.fill_(float("nan"))
    scratch = RouteScratch(tokens, len(held), device)
    for poisoned in (buffers.rank, buffers.counts, buffers.first_tile, buffers.tiles, scratch.counts):
        poisoned.fill_(-(2**30))
    return buffers, scratch


def places(buffers: MixedWorkspace | Fp8Workspace) -> list[Tensor]:
    """What ranking leaves."""
    return [
        each.clone()
        for each in (buffers.rank, buffers.counts, buffers.first_tile, buffers.tiles, buffers.tile_count)
    ]


def random_router(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    weight = torch.randn(experts, DIM, device="cuda") / 54
    x, bias = torch.randn(tokens, DIM, device="cuda"), torch.randn(experts, device="cuda")
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


def chosen(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Ids by every router."""
    workspace = MoeWorkspace(len(x), len(weight), x.device)
    buffers, scratch = ranking(len(x), len(weight))
    return {
        "chunk": route(x, weight, bias, 4)[0],
        "chunk in one launch": route_ranked(x, weight, bias, buffers, scratch, 64)[0],
        "decode": route_grouped(x, weight, bias, workspace).expert_ids,
    }


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", [1, 17])
def test_logits_closer_than_bf16_can_tell_keep_their_order(experts: int, tokens: int) -> None:
    """Around 8 two bf16 numbers lie 1/16 apart; these logits 1/2048 or more, exact in float32."""
    torch.manual_seed(experts)
    order = torch.randperm(experts)
    weight = torch.zeros(experts, DIM)
    weight[:, :64] = 0.125
    weight[:, 64] = order / 2048
    x = torch.ones(tokens, DIM).bfloat16().cuda()
    best = order.argsort(descending=True)[:4].cuda()
    for name, ids in chosen(x, weight.bfloat16().cuda(), torch.zeros(experts).bfloat16().cuda()).items():
        assert torch.equal(ids, best.expand(tokens, 4)), name


def test_random_choices_differ_only_where_logits_tie() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, DIM).bfloat16().cuda(), (torch.randn(32, DIM) / 54).bfloat16().cuda()
    bias = torch.randn(32).bfloat16().cuda()
    logits = reference.linear(x.double(), weight.double(), bias.double())
    exact = logits.topk(4).indices
    for name, ids in chosen(x, weight, bias).items():
        apart = (logits.gather(1, ids) - logits.gather(1, exact)).abs()
        assert float(apart.max()) < 1e-4, name
        assert float((ids == exact).double().mean()) > 0.999, name


@pytest.mark.parametrize(
    ("tokens", "experts", "held"),
    [
        (1, 128, None),
        (33, 32, None),
        (1024, 32, None),
        (1024, 128, None),
        (1024, 128, range(64, 128)),
        (2000, 32, range(16)),
        (8192, 128, None),
        (8192, 32, range(8, 16)),
    ],
)
@pytest.mark.parametrize("resident", [False, True], ids=["widened", "resident"])
def test_one_launch_ranks_as_the_ranking_launch(
    tokens: int, experts: int, held: range | None, resident: bool
) -> None:
    """Of the ids that it chose itself, which are the plain router's but for ties."""
    torch.manual_seed(tokens)
    x, weight, bias = random_router(tokens, experts)
    live = torch.tensor([max(tokens - 5, 1)], dtype=torch.int32, device="cuda")
    buffers, scratch = ranking(tokens, experts, held, resident)
    tile = buffers.tile if isinstance(buffers, Fp8Workspace) else 64
    ids, weights = route_ranked(x, weight, bias, buffers, scratch, tile, live)
    apart, _ = ranking(tokens, experts, held, resident)
    if isinstance(apart, Fp8Workspace):
        prefill.route(ids, apart)
    else:
        mixed.route(ids, apart, tile)
    for ours, theirs in zip(places(buffers), places(apart), strict=True):
        assert torch.equal(ours, theirs)
    plain, shares = route(x, weight, bias, 4, live)
    same = (ids == plain).all(-1)
    assert float(same.double().mean()) > 0.998  # others are ties
    assert bool((ids[int(live) :] == -1).all())
    torch.testing.assert_close(weights[same].float(), shares[same].float(), rtol=2**-7, atol=1e-5)


@alone_and_beside_copies
@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", [20, 1030, 8192])
def test_every_one_launch_is_the_same(tokens: int, experts: int, beside: bool) -> None:
    torch.manual_seed(tokens)
    inputs = [random_router(tokens, experts) for _ in range(2)]
    buffers, scratch = ranking(tokens, experts)

    def launch(turn: int, *outs: Tensor) -> None:
        ids, weights = route_ranked(*inputs[turn], buffers, scratch, 64)
        for out, found in zip(outs, (ids, weights, buffers.rank, buffers.counts), strict=True):
            out.copy_(found)

    initial = torch.empty(tokens, 4, dtype=torch.int64, device="cuda"), buffers.rank, buffers.counts
    weights = torch.empty(tokens, 4, dtype=torch.bfloat16, device="cuda")
    check_launches(launch, initial[0], weights, *initial[1:], beside=beside)


@pytest.mark.parametrize("tokens", [33, 1024])
def test_a_token_is_routed_alike_in_any_chunk(tokens: int) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = random_router(tokens, 128)
    whole = route_ranked(x, weight, bias, *ranking(tokens, 128), 64)
    part = route_ranked(x[7:30].contiguous(), weight, bias, *ranking(23, 128), 64)
    for ours, theirs in zip(part, whole, strict=True):
        assert torch.equal(ours, theirs[7:30])


def test_one_launch_keeps_nan_to_its_token() -> None:
    x, weight, bias = random_router(80, 32)
    x[40, 100] = float("nan")
    ids, weights = route_ranked(x, weight, bias, *ranking(80, 32), 64)
    assert bool(((ids >= 0) & (ids < 32)).all())
    assert bool(weights[40].isnan().all())
    assert not bool(weights[[*range(40), *range(41, 80)]].isnan().any())


def test_one_launch_refuses_what_it_cannot_route() -> None:
    x, weight, bias = random_router(8, 32)
    for text, arguments in (
        ("9 tokens", (torch.cat((x, x[:1])), weight, bias, *ranking(8, 32), 64)),
        ("x is", (x.float(), weight, bias, *ranking(8, 32), 64)),
        ("5 experts", (x, weight[:5], bias[:5], *ranking(8, 32), 64)),
        ("beyond them", (x, weight[:8], bias[:8], *ranking(8, 32), 64)),
        ("tiles of 65", (x, weight, bias, *ranking(8, 32), 65)),
    ):
        with pytest.raises(ValueError, match=text):
            route_ranked(*arguments)
