"""The device's sampler against the plain one, on the same logits, on the CPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine import device_choice
from antiphon.engine.batch import Work
from antiphon.engine.batch_rows import BatchRows
from antiphon.engine.device_runtime import HostRuntime
from antiphon.engine.device_sampler import DeviceSampler, uniforms
from antiphon.engine.sampler import Choice, SamplingRow, mixed_seed, sample, uniform
from antiphon.engine.sequence import Sequence
from antiphon.engine.step_memory import StepMemory
from antiphon.protocol.messages import SamplingParams

VOCABULARY, ROWS = 1300, 24


class Bench:
    """A device sampler and the rows of its steps."""

    def __init__(self, kit: Any, vocabulary: int = VOCABULARY) -> None:
        self.kit = kit
        self.memory = StepMemory(HostRuntime(), ROWS, 0)
        self.sampler = DeviceSampler(self.memory, vocabulary)
        self.rows = BatchRows()

    def sequence(self, name: str, output: int, **sampling: Any) -> Sequence:
        request = self.kit.request(name, (1, 2, 3), output=range(output), **{"max_tokens": 99, **sampling})
        return Sequence(request, 0, 0.0)

    def step(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Choice]:
        """``logits[i]`` belong to ``sequences[i]``."""
        work = [Work(sequence, len(sequence.token_ids) - 1, 1, True) for sequence in sequences]
        rows = np.array(self.rows.assign(sequences))
        host = self.memory.take()
        sampling = self.sampler.prepare(work, rows, self.rows.version, host)
        by_row = torch.empty_like(logits)
        by_row[torch.from_numpy(rows)] = logits

        def issue() -> None:
            sampling.send()
            sampling.fetch(sampling.choose(by_row))

        choices = sampling.read(HostRuntime().submit(issue))
        taken = [c.token_id for c in choices if c.token_id is not None]
        held = self.memory.sampled[torch.from_numpy(rows)].tolist()
        assert taken == [t for c, t in zip(choices, held, strict=True) if c.token_id is not None]
        return choices


def _expected(logits: torch.Tensor, sequences: list[Sequence]) -> list[Choice]:
    rows = []
    for sequence in sequences:
        assert isinstance(sequence.request.sampling, SamplingParams)
        rows.append(SamplingRow(sequence.request.sampling, sequence.output))
    return sample(logits, rows)


def _logits(rows: int, seed: int, vocabulary: int = VOCABULARY, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if ties else logits


SAMPLING = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**64 - 1),
        "temperature": st.sampled_from((0.0, 0.0, 1e-320, 0.3, 1.0, 1.0, 5.0)),
        "top_k": st.sampled_from((0, 0, 0, 1, 40, 256, 257, 5000)),
        "top_p": st.sampled_from((1.0, 1.0, 0.01, 0.9, 0.9999)),
        "min_p": st.sampled_from((0.0, 0.0, 0.05)),
        "frequency_penalty": st.sampled_from((0.0, 0.0, 0.7)),
        "presence_penalty": st.sampled_from((0.0, 0.0, -0.4)),
        "logit_bias": st.sampled_from(((), (), ((5, 8.0), (1299, -3.0), (2, 0.1)))),
        "min_tokens": st.sampled_from((0, 0, 4)),
        "stop_token_ids": st.sampled_from(((), (7, 9))),
        "top_logprobs": st.sampled_from((None, None, 0, 3, 40)),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(SAMPLING, min_size=1, max_size=ROWS), seed=st.integers(0, 10**6), ties=st.booleans())
def test_the_choice_is_the_plain_one(kit: Any, rows: list[dict[str, Any]], seed: int, ties: bool) -> None:
    bench = Bench(kit)
    sequences = [bench.sequence(f"s{i}", i % 7, **more) for i, more in enumerate(rows)]
    for step in range(2):
        logits = _logits(len(rows), seed + step, ties=ties)
        expected = _expected(logits, sequences)
        got = bench.step(logits, sequences)
        again = [i for i, choice in enumerate(got) if choice.undecided]
        for i in again:
            sequences[i].sorts_whole_row = True
        if again:
            settled = bench.step(logits, sequences)
            assert all(settled[i].token_id == got[i].token_id for i in range(len(rows)) if i not in again)
            got = settled
        assert [choice.token_id for choice in got] == [choice.token_id for choice in expected]
        for one, other in zip(got, expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-6)
                assert [p for _, p in one.logprobs.top] == pytest.approx(
                    [p for _, p in other.logprobs.top], abs=1e-6
                )
        for sequence, choice in zip(sequences, got, strict=True):
            sequence.token_ids.append(choice.token_id or 0)


@pytest.mark.parametrize("more", [{}, {"top_k": 40}, {"top_p": 0.99}], ids=str)
@pytest.mark.parametrize("of_another_way", [0, 1])
def test_min_p_is_heeded_whoever_else_is_there(kit: Any, more: dict[str, Any], of_another_way: int) -> None:
    """Some rows want it; all may be of one way, which is then not sorted out row by row."""
    bench, rows = Bench(kit), 12
    sampling = [{"temperature": 1.0, "seed": i, **more} for i in range(rows)]
    without = [bench.sequence(f"w{i}", 0, **each) for i, each in enumerate(sampling)]
    for each in sampling[1::2]:
        each["min_p"] = 0.9
    if of_another_way:
        sampling[0] = {"temperature": 0.0}
    sequences = [bench.sequence(f"s{i}", 0, **each) for i, each in enumerate(sampling)]
    logits = _logits(rows, 9)
    expected = _expected(logits, sequences)
    assert expected[1::2] != _expected(logits, without)[1::2], "somebody would say something else without it"
    assert bench.step(logits, sequences) == expected


def test_rows_change_hands_without_a_trace(kit: Any) -> None:
    rng = random.Random(4)
    bench = Bench(kit)
    alive = [bench.sequence(f"s{i}", i, seed=i, temperature=1.0) for i in range(6)]
    for step in range(60):
        if rng.random() < 0.4 and len(alive) > 1:
            alive.pop(rng.randrange(len(alive)))
        if rng.random() < 0.4 and len(alive) < ROWS:
            more = rng.choice(({}, {"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.3, "top_logprobs": 1}))
            alive.insert(0, bench.sequence(f"n{step}", 2, seed=step, **{"temperature": 0.7, **more}))
        rng.shuffle(alive)
        logits = _logits(len(alive), step)
        expected = _expected(logits, alive)
        got = bench.step(logits, alive)
        assert [c.token_id for c in got] == [c.token_id for c in expected]


def test_rows_stay_where_they_are(kit: Any) -> None:
    bench = Bench(kit)
    a, b, c, d = (bench.sequence(name, 1) for name in "abcd")
    rows = BatchRows()
    assert rows.assign([a, b, c]) == [0, 1, 2]
    assert rows.version == 1
    assert rows.assign([a, b, c]) == [0, 1, 2]
    assert rows.version == 1
    assert rows.assign([b, c]) == [1, 0], "c lay beyond the end and takes the hole"
    assert rows.assign([d, b, c]) == [2, 1, 0]
    assert rows.version == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("more", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 600}])
def test_a_row_that_is_not_finite_harms_no_other(kit: Any, value: float, more: dict[str, Any]) -> None:
    bench = Bench(kit)
    sequences = [bench.sequence(f"s{i}", 0, **{"temperature": 1.0, **more}) for i in range(3)]
    logits = _logits(3, 1)
    if value < 0:
        logits[1] = value
    else:
        logits[1, 5] = value
    got = bench.step(logits, sequences)
    assert got[1] == Choice(None)
    expected = _expected(logits[[0, 2]], [sequences[0], sequences[2]])
    assert [got[0].token_id, got[2].token_id] == [choice.token_id for choice in expected]
    assert bool((bench.memory.sampled < VOCABULARY).all()), "what the next step embeds is a token"


def test_more_log_probabilities_than_there_is_room_for(kit: Any) -> None:
    bench = Bench(kit)
    sequences = [bench.sequence(f"s{i}", 0, temperature=0.0, top_logprobs=n) for i, n in enumerate((900, 2))]
    logits = _logits(2, 3)
    got = bench.step(logits, sequences)
    for one, other in zip(got, _expected(logits, sequences), strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]


def test_an_open_draw_is_said_and_then_settled(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "CANDIDATES", 4)
    bench = Bench(kit)
    sequence = bench.sequence("a", 0, temperature=30.0, top_p=0.9)
    logits = _logits(1, 5)
    assert bench.step(logits, [sequence]) == [Choice(None, undecided=True)]
    sequence.sorts_whole_row = True
    assert bench.step(logits, [sequence]) == _expected(logits, [sequence])


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1), position=st.integers(0, 10**6))
def test_uniforms_are_those_of_the_definition(seeds: list[int], position: int) -> None:
    got = uniforms(
        np.array([mixed_seed(seed) for seed in seeds], dtype=np.uint64), np.full(len(seeds), position)
    )
    assert got.tolist() == [uniform(seed, position) for seed in seeds]
