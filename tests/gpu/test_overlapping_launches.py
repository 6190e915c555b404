"""Chunks of ranks whose launches begin while the ones ahead end, on a real GPU, bit for bit as in turn."""

from __future__ import annotations

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from test_moe_chunks import EXPERTS, Layer
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from antiphon.kernels import reference
from antiphon.kernels.attention.prefill_hopper import (
    HEAD_DIM,
    PAGE,
    chunk_rope_and_write,
    hopper_prefill_attention,
)
from antiphon.kernels.dense.rope import rotation_table
from antiphon.kernels.moe.chunk_route import RouteScratch, route_ranked
from antiphon.kernels.moe.mixed import MixedWorkspace, moe_mixed
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.reference import PagedSequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, LIVE, TILE = 700, 650, 64
HEADS, KV_HEADS = 32, 4
HELD = range(EXPERTS // 2, EXPERTS)
REPLAYS = 40


def random(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).bfloat16()


class RankLayer:
    """A layer of a chunk as one of two ranks issues it, norms in the place of its sums over ranks."""

    def __init__(self, window: int | None) -> None:
        device, pages = torch.device("cuda"), -(-TOKENS // PAGE)
        self.window = window
        self.qkv, self.out = random((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM), random(DIM, HEADS * HEAD_DIM)
        self.sinks = torch.randn(HEADS, device=device)
        self.router = random(EXPERTS, DIM), random(EXPERTS)
        self.experts = Layer().part(HELD.start, len(HELD))
        self.workspace = MixedWorkspace(TOKENS, EXPERTS, device, HELD.start, len(HELD))
        self.scratch = RouteScratch(TOKENS, len(HELD), device)
        self.live = torch.tensor([LIVE], dtype=torch.int32, device=device)
        self.positions = torch.arange(TOKENS, device=device)
        frequencies = reference.yarn_inv_freq(HEAD_DIM, 150_000.0, 32.0, 4096, 32.0, 1.0)
        self.rotation = rotation_table(*frequencies, TOKENS).to(device)
        self.pages = torch.zeros(pages, KV_HEADS, 2, PAGE, HEAD_DIM, dtype=torch.bfloat16, device=device)
        table = torch.randperm(pages, device=device)
        self.sequences = PagedSequences(
            table[None].int(),
            torch.tensor([0, TOKENS], dtype=torch.int32, device=device),
            torch.tensor([TOKENS], dtype=torch.int32, device=device),
            table[self.positions // PAGE] * PAGE + self.positions % PAGE,
        )

    def issue(self, x: Tensor, overlap: bool) -> Tensor:
        """[T, DIM] -> [T, DIM]."""
        query = torch.empty(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=x.device)
        qkv = linear(rms_norm(x, (DIM,)), self.qkv)
        chunk_rope_and_write(
            *(qkv, self.positions, self.sequences.slot, self.rotation, self.pages, query, overlap)
        )
        hopper_prefill_attention(
            *(query, self.pages, self.sequences, self.sinks, self.window, HEAD_DIM**-0.5, TOKENS, query),
            overlap=overlap,
        )
        normed = rms_norm(linear(query.flatten(1), self.out), (DIM,))
        choice = route_ranked(
            *(normed, *self.router, self.workspace, self.scratch, TILE, self.live), overlap=overlap
        )
        weights = self.experts.streamed, self.experts.exponents
        return moe_mixed(normed, *choice, *weights, self.workspace, None, TILE, ranked=True, overlap=overlap)

    def issue_two(self, x: Tensor, overlap: bool) -> Tensor:
        """This layer behind itself."""
        return self.issue(self.issue(x, overlap), overlap)


@pytest.fixture(params=[None, 128], ids=["full", "sliding"])
def layer(request: pytest.FixtureRequest) -> RankLayer:
    torch.manual_seed(5)
    return RankLayer(request.param)


@pytest.fixture
def inputs() -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(TOKENS, DIM, device="cuda").bfloat16() for _ in range(2)]


@alone_and_beside_copies
def test_every_launch_is_the_one_in_turn(layer: RankLayer, inputs: list[Tensor], beside: bool) -> None:
    expected = [layer.issue_two(x, overlap=False) for x in inputs]
    assert all(bool(each.isfinite().all()) for each in expected)

    def launch(turn: int, out: Tensor, pages: Tensor) -> None:
        out.copy_(layer.issue_two(inputs[turn], overlap=True))
        pages.copy_(layer.pages)

    check_launches(launch, torch.full_like(inputs[0], float("nan")), layer.pages, beside=beside)
    for x, in_turn in zip(inputs, expected, strict=True):
        assert torch.equal(layer.issue_two(x, overlap=True), in_turn)


def test_every_replay_is_the_one_in_turn(layer: RankLayer, inputs: list[Tensor]) -> None:
    """Two inputs take turns, so that what one replay leaves is wrong for the next."""
    expected = [layer.issue_two(x, overlap=False) for x in inputs]
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer.issue_two(x, overlap=True)
    for index in range(REPLAYS):
        x.copy_(inputs[index % 2])
        graph.replay()
        assert torch.equal(out, expected[index % 2]), index
