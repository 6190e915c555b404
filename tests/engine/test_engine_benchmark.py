"""The engine's benchmark at toy size on the CPU, and the floors against figures worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from antiphon.benchmarks import engine as benchmark
from antiphon.benchmarks import engine_decode, engine_host_cost, engine_model
from antiphon.benchmarks.engine_prompt_cost import LonePrompts, PacedRuntime
from antiphon.benchmarks.expert_spread import expert_spread, recorded_routing
from antiphon.benchmarks.floors import (
    Form,
    decode_floor_ms,
    expected_experts,
    prefill_floor_ms,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.kernels import reference
from antiphon.model import chunk_router
from antiphon.model.config import GptOssConfig, preset


@pytest.mark.parametrize(
    ("model", "batch", "context", "floor"),
    [
        ("gpt-oss-20b", 1, 8192, 0.815),
        ("gpt-oss-20b", 8, 8192, 2.239),
        ("gpt-oss-20b", 128, 8192, 8.078),
        ("gpt-oss-20b", 32, 32768, 7.986),
        ("gpt-oss-120b", 1, 8192, 1.106),
        ("gpt-oss-120b", 32, 8192, 10.80),
    ],
)
def test_decode_floors(model: str, batch: int, context: int, floor: float) -> None:
    assert decode_floor_ms(preset(model), batch, context) == pytest.approx(floor, rel=3e-3)


@pytest.mark.parametrize(
    ("model", "tokens", "form", "floor"),
    [
        ("gpt-oss-20b", 1024, "fp8", 4.49),
        ("gpt-oss-20b", 8192, "fp8", 37.2),
        ("gpt-oss-20b", 32768, "fp8", 228.9),
        ("gpt-oss-120b", 1024, "mxfp4", 13.34),
        ("gpt-oss-120b", 8192, "mxfp4", 56.0),
    ],
)
def test_prefill_floors(model: str, tokens: int, form: Form, floor: float) -> None:
    assert prefill_floor_ms(preset(model), tokens, form) == pytest.approx(floor, rel=5e-3)


def test_the_spread_of_experts_is_seen() -> None:
    config = preset("gpt-oss-20b")
    assert expected_experts(config, 1) == pytest.approx(4)
    even = [torch.rand(64, 32).topk(4).indices for _ in range(50)]
    assert expert_spread(config, even) == pytest.approx(1, abs=0.02)
    assert expert_spread(config, [torch.arange(4).expand(64, 4)]) < 0.2
    before = reference.route
    with recorded_routing() as seen:
        reference.route(torch.randn(3, 8), torch.randn(5, 8), torch.zeros(5), 2)
    assert [ids.shape for ids in seen] == [(3, 2)]
    assert reference.route is before


def test_what_a_chunk_routes_is_seen_without_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in e4m3 would otherwise seem to touch no expert."""
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [-1, -1, -1, -1]])
    for name in ("route", "route_ranked"):
        monkeypatch.setattr(chunk_router, name, lambda *_, **__: (ids, torch.ones(3, 4)))
    weights, buffers = (torch.empty(8, 8), torch.empty(8)), mock.MagicMock()
    router = chunk_router.ChunkRouter(8, torch.device("cpu"))
    with recorded_routing() as seen:
        for tokens in (1024, 1025):
            router(torch.empty(tokens, 8), weights, buffers, 32, torch.empty(1))
    assert [each.tolist() for each in seen] == [ids[:2].tolist()] * 2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> GptOssConfig:
    """A shape of few weights under the name of the tiny one."""
    config = GptOssConfig(
        num_hidden_layers=4,
        num_experts=8,
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_context_tokens=4096,
    )
    monkeypatch.setattr(engine_model, "preset", lambda name: config)
    return config


@pytest.mark.usefixtures("small")
def test_a_toy_run_says_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--batches", "1,3", "--contexts", "130"]
    arguments += ["--steps", "4", "--prefill", "200", "--chunk", "128", "--repeats", "1", "--out", str(out)]
    assert benchmark.main(arguments) in (0, 1)  # eight experts are too few for an even spread
    decode_one, decode_three, prefill = json.loads(out.read_text())
    assert (decode_one["bench"], decode_one["batch"], decode_one["context"]) == ("decode_step", 1, 130)
    assert decode_one["expert_spread"] == 1.0, "one token touches as many experts as it has"
    assert decode_one["torch"] == torch.__version__
    assert 0.3 < decode_three["expert_spread"] < 1.5
    assert (prefill["bench"], prefill["input_tokens"], prefill["unit"]) == ("prefill", 200, "ms")
    for record in (decode_one, decode_three, prefill):
        assert record["value"] > record["floor"] > 0
        assert record["peer"] is None
        assert {"model", "layout", "device", "commit", "date"} <= record.keys()
    assert capsys.readouterr().out.count("floor") == 3


@pytest.mark.usefixtures("small")
def test_a_run_that_goes_wrong_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = engine_model.make_bench("tiny", torch.device("cpu"))
    engine = engine_decode.DecodingEngine(bench, 1, 70, 8, graphs=False)
    engine.start(1)

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), bench.model.config.vocab_size), float("nan"))

    monkeypatch.setattr(bench.model, "logits", broken)
    with pytest.raises(engine_model.BenchmarkError, match="not finite"):
        engine_decode.timed_steps(engine.loop, 1, 4)


@pytest.mark.usefixtures("small")
def test_batches_of_one_engine_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own sequences at the context asked for, and nothing of those before."""
    bench = engine_model.make_bench("tiny", torch.device("cpu"))
    lengths: list[set[int]] = []
    timed = engine_decode.timed_steps

    def seen(loop: EngineLoop, batch: int, steps: int) -> list[float]:
        snapshot = loop.snapshot()
        lengths.append({snapshot.running, batch})
        return timed(loop, batch, steps)

    monkeypatch.setattr(engine_decode, "timed_steps", seen)
    steps = engine_decode.DecodeSteps(bench, 4, 70, 3)
    records = [steps.point(batch, 1.0) for batch in (1, 4, 2)]
    assert [record.batch for record in records] == [1, 4, 2]
    assert lengths == [{1}, {1}, {4}, {4}, {2}, {2}]
    assert all(record.context == 70 and record.value > 0 for record in records)
    with pytest.raises(engine_model.BenchmarkError, match="of 5 sequences run"):
        steps.point(5, 1.0)


@pytest.mark.usefixtures("small")
def test_a_colocated_prompt_takes_its_first_token_from_its_own_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = engine_model.make_bench("tiny", torch.device("cpu"))
    kinds: list[RequestKind] = []
    submit = EngineLoop.submit

    def seen(loop: EngineLoop, request: EngineRequest) -> None:
        kinds.append(request.kind)
        submit(loop, request)

    monkeypatch.setattr(EngineLoop, "submit", seen)
    monkeypatch.setattr(benchmark, "LEAST_S", 0.0)
    record = benchmark.prefill_point(bench, 200, 128, 1, colocated=True)
    assert kinds == [RequestKind.COLOCATED] * 2
    assert record.choices == "first token by the chunk itself"
    assert not record.is_default, "it is not what the two halves of a deployment take"
    kinds.clear()
    assert benchmark.prefill_point(bench, 200, 128, 1).is_default
    assert kinds == [RequestKind.PREFILL_ONLY, RequestKind.REMOTE_KV] * 2


@pytest.mark.usefixtures("small")
def test_long_prompts_are_timed_until_it_is_enough_and_short_ones_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = engine_model.make_bench("tiny", torch.device("cpu"))

    def repeats(wanted: int, enough_s: float = math.inf) -> object:
        return benchmark.prefill_point(bench, 200, 128, wanted, enough_s=enough_s).extra["repeats"]

    record = benchmark.prefill_point(bench, 200, 128, 2)
    assert int(str(record.extra["repeats"])) > 2
    monkeypatch.setattr(benchmark, "LEAST_S", 0.0)
    assert repeats(2) == 2
    assert repeats(5, enough_s=0.0) == 1


def test_the_cost_of_planning_is_measured_without_a_model(monkeypatch: Any) -> None:
    assert 0 < engine_host_cost.step_cost_us(2, steps=5) < 1e5


def test_a_device_that_is_told_its_times_says_when_it_stood_still() -> None:
    runtime = PacedRuntime(chunk_s=10.0, step_s=2.0)
    chunk = runtime.capture_parts(lambda cut: torch.zeros(1))
    step = runtime.capture(lambda: torch.zeros(1))
    runtime.forget()
    begin = runtime.now()
    first = runtime.submit(chunk.replay)
    second = runtime.submit(step.replay)
    first.wait()
    assert runtime.now() - begin == pytest.approx(10, abs=0.1)
    assert runtime.busy_s == 10
    second.wait()
    assert runtime.busy_s == 11
    assert runtime.waited_s - begin == pytest.approx(11, abs=0.1), "one behind the other, without a gap"


def test_where_a_lone_prompt_holds_up_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a device so slow that no pause of this process, such as a collection of garbage, holds it up.
    monkeypatch.setattr(LonePrompts, "MS_PER_TOKEN", 10.0)
    monkeypatch.setattr(LonePrompts, "STEP_MS", 2000.0)
    prompts = LonePrompts(200, layer_groups=2)
    for case in (prompts.colocated, prompts.prefill, prompts.decode, prompts.both_halves):
        cost = case()
        assert 0 < cost.before_us < 1e5
        assert 0 < cost.after_us < 1e5
        assert (cost.between_us > 1) == (case == prompts.both_halves), (
            "it alone must know the first step's end"
        )
        assert cost.total_us == cost.before_us + cost.between_us + cost.after_us
