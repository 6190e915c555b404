"""The routers of chunks and of decode steps on the GPU, where logits are nearly equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.decode import MoeWorkspace, route_grouped
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.router import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def chosen(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Ids by either router."""
    workspace = MoeWorkspace(len(x), len(weight), x.device)
    return {
        "chunk": route(x, weight, bias, 4)[0],
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
