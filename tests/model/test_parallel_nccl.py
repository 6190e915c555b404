"""The same layouts on two GPUs, over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.sampling import choose_tokens
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.parallel.vocabulary import choose_over_ranks
from antiphon.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

Ranks = Callable[..., list[Any]]


class Pages:
    """One sequence's pages on a device, in order."""

    def __init__(self, config: GptOssConfig, kv_heads: int, device: torch.device) -> None:
        shape = (16, kv_heads, 2, 16, config.head_dim)
        self._layers = [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]

    def layer(self, index: int) -> Tensor:
        return self._layers[index]


@pytest.mark.parametrize("experts", [False, True], ids=["TP2", "EP2 TP2"])
def test_two_gpus_equal_one_cpu(
    experts: bool, spread_config: GptOssConfig, in_ranks: Ranks, one_sequence: Any, forward: Any
) -> None:
    single = Transformer(spread_config, torch.float32)
    fill(single, synthesize_parameters(spread_config))
    token_ids = torch.randint(0, spread_config.vocab_size, (100,), generator=torch.Generator().manual_seed(0))
    expected = forward(single, token_ids)

    def work(group: RankGroup) -> tuple[Tensor, Tensor] | None:
        device = torch.device("cuda", group.rank)
        torch.cuda.set_device(device)
        layout = ParallelLayout(2, experts, group.rank)
        model = ParallelTransformer(spread_config, layout, group.communicator, torch.float32, device)
        fill(model, shard_parameters(spread_config, layout, synthesize_parameters(spread_config)))
        pages = Pages(spread_config, len(model.shape.kv_heads), device)
        if group.rank > 0:
            FollowerLoop(model, pages, group).run()
            return None
        leader = LeaderModel(model, group)
        leader.start()
        steps = one_sequence(single, 256, 16)
        parts = []
        for begin in range(0, 100, 32):
            batch = steps.batch(token_ids[begin : begin + 32], begin)
            parts.append(leader.forward(to_device(batch, device), pages))
        hidden = torch.cat(parts)
        result = hidden.cpu(), leader.logits(hidden).cpu()
        leader.close()
        return result

    hidden, logits = in_ranks(2, work, cuda=True)[0]
    torch.testing.assert_close(hidden, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits, single.logits(expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_two_gpus_choose_what_one_chooses(rows: int, in_ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(rows, 201_088, generator=generator) * 3
    inverse = torch.linspace(0.5, 2.0, rows, dtype=torch.float64)
    draws = torch.stack((inverse, torch.rand(rows, dtype=torch.float64, generator=generator)))

    def work(group: RankGroup) -> tuple[Tensor, Tensor]:
        device = torch.device("cuda", group.rank)
        torch.cuda.set_device(device)
        width = whole.shape[1] // 2
        mine = whole[:, group.rank * width : (group.rank + 1) * width].to(device).contiguous()
        arguments = (mine, group.rank * width, group.communicator)
        drawn = choose_over_ranks(*arguments, draws.to(device))
        return choose_over_ranks(*arguments).cpu(), drawn.cpu()

    results = in_ranks(2, work, cuda=True)
    sampled = torch.empty(rows, dtype=torch.int64, device="cuda")
    best = choose_tokens(whole.cuda(), sampled).cpu()
    drawn = choose_tokens(whole.cuda(), sampled, *draws.cuda()).cpu()
    for result in results:
        assert torch.equal(result[0], best)
        assert torch.equal(result[1], drawn), "only float64 sums are rounded in another order"


def to_device(batch: Any, device: torch.device) -> Any:
    """A copy of a batch whose every tensor lies on a device."""

    def group(sequences: Any) -> Any:
        fields = ("block_table", "query_start", "kv_len", "slot")
        return type(sequences)(*(getattr(sequences, name).to(device) for name in fields))

    moved = (batch.token_ids.to(device), batch.positions.to(device))
    return type(batch)(*moved, group(batch.full), group(batch.sliding))
