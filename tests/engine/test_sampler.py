"""The sampler against a slow definition, its statistics, and its independence of the batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.engine import sampler
from antiphon.engine.sampler import SamplingRow, sample, uniform
from antiphon.protocol.messages import SamplingParams

VOCABULARY = 1300
"""More than the candidates that are looked at before a row is sorted whole."""


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **changes})


def _logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def _support(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """Token -> probability by the definition, one row, in plain Python."""
    scaled = [x / params.temperature for x in logits.tolist()]
    best = max(scaled)
    weight = {token: math.exp(x - best) for token, x in enumerate(scaled)}
    weight = {token: w for token, w in weight.items() if w >= params.min_p}
    ranked = sorted(weight, key=lambda token: (-scaled[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weight[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weight[token]
        if mass >= params.top_p * total:
            break
    return {token: weight[token] / mass for token in kept}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [900, 41, 1200]] = 5.0
    logits[1, [7, 3]] = 2.0
    greedy = SamplingRow(_params(temperature=0.0), ())
    assert [choice.token_id for choice in sample(logits, [greedy, greedy])] == [41, 3]


def test_uniform_is_a_pure_function_that_looks_random() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 <= number < 1 for number in numbers)
    deciles = Counter(int(number * 10) for number in numbers)
    assert all(900 < deciles[decile] < 1100 for decile in range(10))
    pairs = [(uniform(5, p) - 0.5) * (uniform(5, p + 1) - 0.5) for p in range(10_000)]
    assert abs(sum(pairs) / len(pairs)) < 0.005
    assert uniform(-1, 0) == uniform(2**64 - 1, 0) != uniform(1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
        {"top_k": 1},
    ],
)
def test_frequencies_follow_the_definition(changes: dict[str, float]) -> None:
    logits = _logits(1, seed=3, vocabulary=40, spread=1.5)
    params = _params(**changes)
    support = _support(logits[0], params)
    draws = 4000
    rows = [SamplingRow(_params(**changes, seed=seed), ()) for seed in range(draws)]
    counts = Counter(choice.token_id for choice in sample(logits.expand(draws, -1), rows))
    assert set(counts) <= set(support)
    # Pearson's statistic over the cells with an expectation of 5 or more; 5 sigma above its mean.
    cells = [(counts[token], p * draws) for token, p in support.items() if p * draws >= 5]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert statistic < len(cells) + 5 * math.sqrt(2 * len(cells)) + 5


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from((0.2, 1.0, 3.0, 30.0)),
    top_k=st.sampled_from((0, 1, 5, 600, 1300, 5000)),
    top_p=st.sampled_from((0.01, 0.5, 0.99, 0.9999, 1.0)),
    min_p=st.sampled_from((0.0, 0.01, 1.0)),
    ties=st.booleans(),
)
def test_a_draw_is_within_the_support_and_at_its_place(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    logits = _logits(1, seed=seed)
    if ties:  # as bfloat16 logits have
        logits = (logits * 2).round() / 2
    params = _params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = sample(logits, [SamplingRow(params, (1, 2))])[0].token_id
    support = _support(logits[0], params)
    if token not in support:  # float32 weights and the definition may differ on a boundary by one token
        smallest = min(logits[0, t].item() for t in support)
        assert logits[0, token].item() == pytest.approx(smallest, abs=1e-2)
        return
    in_order = sorted(support) if top_k == 0 and top_p == 1 else list(support)
    before = sum(support[t] for t in in_order[: in_order.index(token)])
    assert before - 1e-3 <= uniform(seed, 2) <= before + support[token] + 1e-3


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = random.Random(0)
    logits = (_logits(24, seed=9) * 4).round() / 4
    rows = [
        SamplingRow(
            _params(
                seed=i,
                temperature=rng.choice((0.0, 0.5, 1.0, 5.0)),
                top_k=rng.choice((0, 0, 3, 40, 700)),
                top_p=rng.choice((1.0, 0.9, 0.99)),
                min_p=rng.choice((0.0, 0.05)),
                top_logprobs=rng.choice((None, 0, 3)),
                frequency_penalty=rng.choice((0.0, 0.7)),
            ),
            tuple(range(i)),
        )
        for i in range(24)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [choice.token_id for choice in together] == [choice.token_id for choice in alone]
    shuffled = rng.sample(range(24), 24)
    again = sample(logits[torch.tensor(shuffled)], [rows[i] for i in shuffled])
    assert [choice.token_id for choice in again] == [together[i].token_id for i in shuffled]


def test_a_tie_across_the_candidates_is_settled_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    logits = torch.zeros(1, 100)
    logits[0, 50] = 1.0
    drawn = set()
    for seed in range(200):
        drawn.add(sample(logits, [SamplingRow(_params(seed=seed, top_k=3), ())])[0].token_id)
    assert drawn == {50, 0, 1}


def test_a_wide_top_p_looks_beyond_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    logits = torch.arange(100.0)[None, :] * 0.01
    drawn = {
        sample(logits, [SamplingRow(_params(seed=seed, top_p=0.9), ())])[0].token_id for seed in range(600)
    }
    assert len(drawn) > 60
    assert min(token for token in drawn if token is not None) > 5


def test_penalties_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 10], logits[0, 20], logits[0, 30] = 3.0, 2.5, 2.0

    def choose(output: tuple[int, ...] = (), **changes: Any) -> int | None:
        return sample(logits, [SamplingRow(_params(temperature=0.0, **changes), output)])[0].token_id

    assert choose() == 10
    assert choose((10,), presence_penalty=0.6) == 20
    assert choose((10, 10), presence_penalty=0.4) == 10
    assert choose((10, 10), frequency_penalty=0.3) == 20
    assert choose((10, 20, 20), frequency_penalty=0.4, presence_penalty=0.2) == 10
    assert choose(logit_bias=((30, 1.5),)) == 30
    assert choose(logit_bias=((10, -100.0), (20, -100.0))) == 30
    assert choose(stop_token_ids=(10,), min_tokens=1) == 20
    assert choose((5,), stop_token_ids=(10,), min_tokens=1) == 10
    assert logits[0, 10] == 3.0, "the caller's logits are not touched"


def test_logprobs_are_of_the_untouched_distribution() -> None:
    logits = _logits(3, seed=4)
    expected = torch.log_softmax(logits.double(), dim=-1)
    rows = [
        SamplingRow(_params(temperature=0.0, top_logprobs=5, logit_bias=((17, 100.0),)), ()),
        SamplingRow(_params(temperature=0.3, top_p=0.1), ()),
        SamplingRow(_params(temperature=0.0, top_logprobs=0), ()),
    ]
    biased, silent, chosen_only = sample(logits, rows)
    assert silent.logprobs is None
    assert biased.logprobs is not None
    assert chosen_only.logprobs is not None
    assert biased.token_id == 17
    assert biased.logprobs.chosen == pytest.approx(expected[0, 17].item(), abs=1e-4)
    assert [token for token, _ in biased.logprobs.top] == logits[0].topk(5).indices.tolist()
    assert [p for _, p in biased.logprobs.top] == pytest.approx(expected[0].topk(5).values.tolist(), abs=1e-4)
    assert chosen_only.logprobs.top == ()
    assert chosen_only.logprobs.chosen == pytest.approx(expected[2].max().item(), abs=1e-4)


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    logits = _logits(3)
    logits[1, 5] = float("nan")
    choices = sample(logits, [SamplingRow(_params(temperature=t), ()) for t in (0.0, 1.0, 0.7)])
    assert choices[1].token_id is None
    assert choices[0].token_id == int(logits[0].argmax())
    assert choices[2].token_id is not None


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = _logits(1, spread=10.0)
    token = sample(logits, [SamplingRow(_params(temperature=temperature), ())])[0].token_id
    assert token is not None
    if temperature < 1:
        assert token == int(logits.argmax())
