"""A model over several ranks against the same model on one: same logits, same tokens, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference as ops
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.communicator import SingleRank
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.load import load_parallel_model
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.sharding import shard_parameters
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import ConfigError

TOLERANCE = 5e-5
"""On hidden states of rms 1 and logits with a standard deviation of 3, in float32."""
SEEN = 100 * TOLERANCE
LAYOUTS = [(2, False), (4, False), (2, True), (4, True)]
NAMES = ["TP2", "TP4", "EP2 TP2", "EP4 TP4"]
layouts = pytest.mark.parametrize(("ranks", "experts"), LAYOUTS, ids=NAMES)

Forward = Callable[..., Tensor]
Ranks = Callable[..., list[Any]]


def build(
    config: GptOssConfig, group: RankGroup, expert_parallel: bool, dtype: torch.dtype = torch.float32
) -> ParallelTransformer:
    layout = ParallelLayout(group.size, expert_parallel, group.rank)
    model = ParallelTransformer(config, layout, group.communicator, dtype)
    fill(model, shard_parameters(config, layout, synthesize_parameters(config, seed=0)))
    return model


@pytest.fixture(scope="module")
def single(spread_config: GptOssConfig) -> Transformer:
    model = Transformer(spread_config, torch.float32)
    fill(model, synthesize_parameters(spread_config, seed=0))
    return model


def prompt(config: GptOssConfig, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@layouts
@pytest.mark.parametrize("chunk", [None, 17], ids=["whole", "chunked"])
def test_logits_equal_one_rank(
    ranks: int,
    experts: bool,
    chunk: int | None,
    single: Transformer,
    in_ranks: Ranks,
    forward: Forward,
) -> None:
    token_ids = prompt(single.config, 70)
    expected = forward(single, token_ids)

    def work(group: RankGroup) -> tuple[Tensor, Tensor]:
        model = build(single.config, group, experts)
        hidden = forward(model, token_ids, chunk=chunk)
        return hidden, model.logits(hidden)

    results = in_ranks(ranks, work)
    for hidden, logits in results:
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(logits, single.logits(expected), atol=TOLERANCE, rtol=0)
        # Ranks route for themselves, so they may not differ even in the last place.
        assert torch.equal(hidden, results[0][0])
        assert torch.equal(logits, results[0][1])


@layouts
def test_logits_from_files_with_the_real_vocabulary_equal_one_rank(
    ranks: int,
    experts: bool,
    tiny_directory: Path,
    tiny_model: Transformer,
    in_ranks: Ranks,
    forward: Forward,
) -> None:
    """Each rank reads its own slices; a prompt beyond the window of 128."""
    token_ids = prompt(tiny_model.config, 150)
    expected = tiny_model.logits(forward(tiny_model, token_ids)[-4:])

    def work(group: RankGroup) -> Tensor:
        layout = ParallelLayout(ranks, experts, group.rank)
        model = load_parallel_model(tiny_directory, layout, group.communicator, torch.float32)
        return model.logits(forward(model, token_ids, chunk=64)[-4:])

    for logits in in_ranks(ranks, work):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def test_experts_held_in_two_places_add_up_to_all(single: Transformer) -> None:
    """The op itself: choices of experts that are elsewhere add nothing, whatever their number."""
    block = next(iter(single.block)).mlp
    x = torch.randn(40, single.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids, weights = block.route(x)
    matrices = (block.mlp1_weight, block.mlp1_bias, block.mlp2_weight, block.mlp2_bias)
    whole = ops.moe(x, ids, weights, *matrices)
    for cut in (1, 3, 7):
        parts = [
            ops.moe(x, ids, weights, *(m[begin:end] for m in matrices), first_expert=begin)
            for begin, end in ((0, cut), (cut, 8))
        ]
        torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-5, rtol=0)
        assert float(parts[0].abs().max()) > 0.01


@layouts
def test_greedy_continuation_equals_one_rank(
    ranks: int, experts: bool, single: Transformer, in_ranks: Ranks, one_sequence: Any
) -> None:
    """A chunked prompt, then single tokens across the window's edge, through pages."""
    start, stop = 20, 45
    token_ids = prompt(single.config, start, seed=7)

    def generate(model: Transformer | ParallelTransformer, choose: Callable[[Tensor], int]) -> list[int]:
        kv = one_sequence(model, stop, 8)
        for begin in range(0, start, 8):
            hidden = model.forward(kv.batch(token_ids[begin : min(begin + 8, start)], begin), kv)
        tokens: list[int] = []
        for position in range(start, stop):
            tokens.append(choose(hidden[-1:]))
            hidden = model.forward(kv.batch(torch.tensor(tokens[-1:]), position), kv)
        return tokens

    def work(group: RankGroup) -> list[int]:
        model = build(single.config, group, experts)
        return generate(model, lambda hidden: int(model.greedy(hidden)))

    margins: list[float] = []

    def best(hidden: Tensor) -> int:
        values, ids = single.logits(hidden)[0].topk(2)
        margins.append(float(values[0] - values[1]))
        return int(ids[0])

    expected = generate(single, best)
    assert len(set(expected)) > 10  # not a loop that any model would fall into
    assert min(margins) > 1e-3, "a near tie: choose another seed"
    assert in_ranks(ranks, work) == [expected] * ranks


def test_bfloat16_differs_by_its_rounding_only(
    single: Transformer, in_ranks: Ranks, forward: Forward
) -> None:
    """Each layer's two sums are rounded once more, so the bound is a few times one rank's own error."""
    token_ids = prompt(single.config, 60)
    exact = forward(single, token_ids)
    rounded = Transformer(single.config, torch.bfloat16)
    fill(rounded, synthesize_parameters(single.config, seed=0))

    def work(group: RankGroup) -> Tensor:
        return forward(build(single.config, group, True, torch.bfloat16), token_ids)

    def error(hidden: Tensor) -> float:
        # The median over tokens: a near tie in the router may give a few of them another expert.
        return float((hidden.float() - exact).norm(dim=-1).div(exact.norm(dim=-1)).median())

    assert error(in_ranks(4, work)[0]) < 2 * error(forward(rounded, token_ids))


def test_one_rank_needs_no_group(single: Transformer, forward: Forward) -> None:
    model = ParallelTransformer(single.config, ParallelLayout(), SingleRank(), torch.float32)
    fill(model, synthesize_parameters(single.config, seed=0))
    token_ids = prompt(single.config, 40)
    hidden = forward(model, token_ids)
    assert torch.equal(hidden, forward(single, token_ids))
    assert torch.equal(model.logits(hidden), single.logits(hidden))


Damage = Callable[[ParallelTransformer, Transformer], None]


def drop_out_bias(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 0:
        next(model.blocks).attn.out.bias.zero_()


def double_out_bias(model: ParallelTransformer, whole: Transformer) -> None:
    if model.layout.rank == 1:
        next(model.blocks).attn.out.bias.copy_(whole.block[0].attn.out.bias)


def drop_expert_bias(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 0:
        next(model.blocks).mlp.mlp2_bias.zero_()


def double_expert_bias(model: ParallelTransformer, whole: Transformer) -> None:
    if model.layout.rank == 1 and not model.layout.expert_parallel:
        next(model.blocks).mlp.mlp2_bias.copy_(whole.block[0].mlp.mlp2_bias)


def drop_head(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 1:
        next(model.blocks).attn.out.weight[:, : model.config.head_dim] = 0


def double_head(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 1:
        next(model.blocks).attn.out.weight[:, : model.config.head_dim] *= 2


def drop_sinks(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 1:
        next(model.blocks).attn.sinks.fill_(-torch.inf)


def shift_sinks(model: ParallelTransformer, whole: Transformer) -> None:
    """Rank 1 takes rank 0's."""
    if model.layout.rank == 1:
        sinks = next(model.blocks).attn.sinks
        sinks.copy_(whole.block[0].attn.sinks[: len(sinks)])


def drop_expert(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 1:
        block = next(model.blocks).mlp
        block.mlp2_weight[0] = 0
        block.mlp2_bias[0] = 0


def double_expert(model: ParallelTransformer, _: Transformer) -> None:
    """Rank 1 counts rank 0's last expert as its first, so that two ranks answer for it."""
    if model.layout.rank == 1:
        next(model.blocks).mlp.first_expert -= 1


def drop_expert_columns(model: ParallelTransformer, _: Transformer) -> None:
    """A block of 32 columns, as a cut inside a block or a missing last one would leave out."""
    if model.layout.rank == 1:
        next(model.blocks).mlp.mlp2_weight[:, :, :32] = 0


def swap_gate_and_up(model: ParallelTransformer, _: Transformer) -> None:
    """What a cut at an odd row would do."""
    if model.layout.rank == 1:
        block = next(model.blocks).mlp
        block.mlp1_weight.copy_(block.mlp1_weight.roll(1, dims=1))


def drop_vocabulary(model: ParallelTransformer, _: Transformer) -> None:
    if model.layout.rank == 1:
        model.embedding.weight.zero_()


DAMAGES: list[tuple[Damage, bool]] = [
    *((drop_out_bias, e) for e in (False, True)),
    *((double_out_bias, e) for e in (False, True)),
    *((drop_expert_bias, e) for e in (False, True)),
    (double_expert_bias, False),
    *((drop_head, e) for e in (False, True)),
    *((double_head, e) for e in (False, True)),
    (drop_sinks, False),
    (shift_sinks, False),
    (drop_expert, True),
    (double_expert, True),
    (drop_expert_columns, False),
    (swap_gate_and_up, False),
    (drop_vocabulary, False),
]


@pytest.mark.parametrize(
    ("damage", "experts"), DAMAGES, ids=[f"{d.__name__}-{'EP' if e else 'TP'}" for d, e in DAMAGES]
)
def test_a_part_dropped_or_doubled_would_be_seen(
    damage: Damage, experts: bool, single: Transformer, in_ranks: Ranks, forward: Forward
) -> None:
    token_ids = prompt(single.config, 60)

    def work(group: RankGroup) -> Tensor:
        model = build(single.config, group, experts)
        damage(model, single)
        return forward(model, token_ids)

    expected = forward(single, token_ids)
    assert (in_ranks(2, work)[0] - expected).abs().max() > SEEN


def test_experts_of_other_ranks_add_nothing_when_none_is_chosen_here(
    single: Transformer, in_ranks: Ranks, forward: Forward
) -> None:
    """One token's three experts leave at least one of four ranks without work."""
    token_ids = prompt(single.config, 1, seed=3)
    expected = forward(single, token_ids)
    results = in_ranks(4, lambda group: forward(build(single.config, group, True), token_ids))
    torch.testing.assert_close(results[0], expected, atol=TOLERANCE, rtol=0)


@layouts
def test_padding_of_experts_is_exact(ranks: int, experts: bool, spread_config: GptOssConfig) -> None:
    """Whatever the padded columns' counterparts hold, zeros in both make them add nothing."""
    layout = ParallelLayout(ranks, experts, ranks - 1)
    shape = layout.shape(spread_config)
    parameters = dict(shard_parameters(spread_config, layout, synthesize_parameters(spread_config)))
    held = len(shape.inner)
    scales = parameters["block.0.mlp.mlp2_weight.scales"]
    assert scales.shape[2] * 32 == shape.inner_padded
    if experts:
        assert shape.inner_padded == held == spread_config.intermediate_size
        return
    assert shape.inner_padded == 128
    assert held < 128
    assert not parameters["block.0.mlp.mlp1_weight.blocks"][:, 2 * held :].any()
    assert not parameters["block.0.mlp.mlp1_bias"][:, 2 * held :].any()
    assert not parameters["block.0.mlp.mlp2_weight.blocks"][:, :, held // 32 :].any()


def test_a_communicator_of_another_rank_is_refused(spread_config: GptOssConfig) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 of 2.*rank 0 of 1"):
        ParallelTransformer(spread_config, ParallelLayout(2, rank=1), SingleRank(), torch.float32)


def test_other_dtypes_are_refused(spread_config: GptOssConfig) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ParallelTransformer(spread_config, ParallelLayout(), SingleRank(), torch.float16)


def test_without_unembedding_it_cannot_sample(spread_config: GptOssConfig) -> None:
    model = ParallelTransformer(
        replace(spread_config, num_hidden_layers=1),
        ParallelLayout(),
        SingleRank(),
        torch.float32,
        "cpu",
        False,
    )
    assert "unembedding.weight" not in dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="output projection"):
        model.logits(torch.zeros(1, spread_config.hidden_size))
