"""Rank 0 leads and the others follow: in order and with the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.rank_group import RankGroup
from antiphon.model.parallel.transformer import ParallelTransformer
from antiphon.model.transformer import Transformer

Build = Callable[..., ParallelTransformer]
Ranks = Callable[..., list[Any]]
Forward = Callable[..., Tensor]
PAGE = 8


def note(seen: list[Any]) -> Callable[[int, int], None]:
    """An ``after_layer`` that writes down (step, layer)."""
    return lambda step, layer: seen.append((step, layer))


def prompt(config: GptOssConfig, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))


def test_the_leader_is_one_model_to_its_caller(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, forward: Forward, build: Build
) -> None:
    """Steps, logits, choices and messages, in the order in which rank 0 gave them."""
    token_ids = prompt(small, 30)
    single = Transformer(small, torch.float32)
    fill(single, synthesize_parameters(small))
    expected = forward(single, token_ids)

    def lead(model: ParallelTransformer, group: RankGroup) -> list[Any]:
        leader = LeaderModel(model, group)
        leader.start()
        kv = one_sequence(model, 30, PAGE)
        layers: list[int] = []
        parts = []
        with torch.inference_mode():  # as an engine calls it
            for begin in range(0, 30, 12):
                leader.publish(b"chunk %d" % begin)
                batch = kv.batch(token_ids[begin : begin + 12], begin)
                parts.append(leader.forward(batch, kv, layers.append))
            hidden = torch.cat(parts)
            leader.publish(b"")
            logits, greedy, best = leader.logits(hidden), leader.greedy(hidden), leader.top_k(hidden[:2], 5)
        leader.close()
        leader.close()
        torch.testing.assert_close(hidden, expected, atol=5e-5, rtol=0)
        torch.testing.assert_close(logits, single.logits(expected), atol=5e-5, rtol=0)
        assert torch.equal(greedy, logits.argmax(-1))
        torch.testing.assert_close(best[0], logits[:2].topk(5).values, atol=5e-5, rtol=0)
        assert layers == [0, 1] * 3
        return []

    def work(group: RankGroup) -> list[Any]:
        model = build(small, group)
        if group.rank == 0:
            return lead(model, group)
        seen: list[Any] = []
        kv = one_sequence(model, 30, PAGE)
        FollowerLoop(model, kv, group, after_layer=note(seen), on_message=seen.append).run()
        return seen

    chunks = zip((b"chunk 0", b"chunk 12", b"chunk 24"), (1, 2, 3), strict=True)
    follower = [*(x for name, step in chunks for x in (name, (step, 0), (step, 1))), b""]
    assert in_ranks(4, work) == [[], *[follower] * 3]


def test_a_message_given_during_a_step_follows_it(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    """An engine announces written layers from within its step; that must not wait for the step to end."""

    def work(group: RankGroup) -> list[Any]:
        model = build(small, group)
        kv = one_sequence(model, 16, PAGE)
        seen: list[Any] = []
        if group.rank > 0:
            FollowerLoop(model, kv, group, after_layer=note(seen), on_message=seen.append).run()
            return seen
        leader = LeaderModel(model, group)
        leader.start()
        for begin in (0, 8):
            batch = kv.batch(prompt(small, 8), begin)
            leader.forward(batch, kv, lambda layer: leader.publish(b"layer %d" % layer))
        leader.close()
        return seen

    steps = [[(step, 0), (step, 1), b"layer 0", b"layer 1"] for step in (1, 2)]
    assert in_ranks(2, work) == [[], [*steps[0], *steps[1]]]


def test_a_bad_choice_is_refused_before_the_others_hear_of_it(
    small: GptOssConfig, in_ranks: Ranks, one_sequence: Any, build: Build
) -> None:
    def work(group: RankGroup) -> None:
        model = build(small, group)
        if group.rank > 0:
            FollowerLoop(model, one_sequence(model, 8, PAGE), group).run()
            return
        leader = LeaderModel(model, group)
        leader.start()
        hidden = torch.zeros(1, small.hidden_size)
        with pytest.raises(ValueError, match=r"k 129 is not within 1 \.\. 128"):
            leader.top_k(hidden, 129)
        assert leader.top_k(hidden, 128)[0].shape == (1, 128)
        leader.close()

    in_ranks(2, work)


def test_a_leader_of_one_rank_works_alone(small: GptOssConfig, one_sequence: Any, build: Build) -> None:
    group = RankGroup.single()
    model = build(small, group)
    leader = LeaderModel(model, group)
    leader.start()
    kv = one_sequence(model, 20, PAGE)
    batch = kv.batch(prompt(small, 20), 0)
    with torch.inference_mode():
        hidden = leader.forward(batch, kv)
        assert torch.equal(hidden, model.forward(batch, kv))
        assert torch.equal(leader.logits(hidden), model.logits(hidden))
    leader.close()
