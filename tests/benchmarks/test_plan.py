"""The cost model's floors and prices, the planner's sense, the simulation against closed forms."""

from __future__ import annotations

import math
import random
from functools import cache
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.benchmarks import floors
from antiphon.benchmarks.plan import work
from antiphon.benchmarks.plan.cost_model import CostModel, build
from antiphon.benchmarks.plan.efficiency import Efficiencies
from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.plan.planner import LAYOUTS, NoPlan, Targets, plans, price_per_million, size_decode
from antiphon.benchmarks.plan.queueing import (
    erlang_c,
    fewest_servers,
    mean_wait_md1_s,
    staffed,
    wait_quantile_s,
)
from antiphon.benchmarks.plan.work import KernelClass
from antiphon.benchmarks.records import Layout
from antiphon.model.config import preset

ONE = Layout()


@cache
def uncalibrated(model: str) -> CostModel:
    return build(model, [])


def decode_floor_ms(model: str, batch: int, context: int, form: floors.Form) -> float:
    parts = work.decode_step(preset(model), ONE, batch, context, form)
    return work.least_bytes(parts) / H200.bytes_per_s * 1e3


# By hand from the published shapes: bytes over 4.8 TB/s, MXFP4 and FP8 weights, bf16 KV, one GPU.
@pytest.mark.parametrize(
    ("model", "batch", "context", "mxfp4_ms", "fp8_ms"),
    [
        ("gpt-oss-20b", 1, 8192, 0.815, 1.048),
        ("gpt-oss-20b", 128, 8192, 8.078, 9.944),
        ("gpt-oss-20b", 32, 32768, 7.986, 9.826),
        ("gpt-oss-120b", 1, 8192, 1.106, 1.456),
        ("gpt-oss-120b", 8, 8192, 4.007, 6.518),
        ("gpt-oss-120b", 32, 8192, 10.80, 17.94),
        ("gpt-oss-120b", 128, 32768, 45.47, 56.48),
    ],
)
def test_decode_floors(model: str, batch: int, context: int, mxfp4_ms: float, fp8_ms: float) -> None:
    assert decode_floor_ms(model, batch, context, "mxfp4") == pytest.approx(mxfp4_ms, rel=1e-3)
    assert decode_floor_ms(model, batch, context, "fp8") == pytest.approx(fp8_ms, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "tokens", "floor_ms"),
    [
        ("gpt-oss-20b", 1024, 3.92),
        ("gpt-oss-20b", 8192, 37.2),
        ("gpt-oss-20b", 32768, 228.9),
        ("gpt-oss-120b", 8192, 56.0),
        ("gpt-oss-120b", 32768, 344.0),
    ],
)
def test_prefill_floors(model: str, tokens: int, floor_ms: float) -> None:
    """By hand: experts in FP8, the rest in bf16; weights are 4-bit ones, and read once."""
    least_s = work.layout_floor_s(preset(model), ONE, tokens, None, None)
    assert least_s * 1e3 == pytest.approx(floor_ms, rel=5e-3)
    assert floors.prefill_floor_ms(preset(model), tokens, "mxfp4") == pytest.approx(floor_ms, rel=5e-3)
    one, four = (work.layout_floor_s(preset(model), Layout(tp), tokens, None, None) for tp in (1, 4))
    assert one / 4 < four < one * 0.6


@pytest.mark.parametrize(
    ("model", "form", "gigabytes"),
    [
        ("gpt-oss-20b", "mxfp4", 13.761),
        ("gpt-oss-20b", "fp8", 22.72),
        ("gpt-oss-120b", "mxfp4", 65.249),
        ("gpt-oss-120b", "bf16", 233.66),
    ],
)
def test_weights(model: str, form: floors.Form, gigabytes: float) -> None:
    weights = floors.weights_on_one_gpu(preset(model), ONE, form, with_unembedding=True)
    assert weights.total / 1e9 == pytest.approx(gigabytes, rel=5e-4)


def test_kv_and_all_reduce_bytes() -> None:
    assert floors.kv_bytes(preset("gpt-oss-20b"), 8192) == pytest.approx(204.5e6, rel=1e-3)
    assert floors.kv_bytes(preset("gpt-oss-120b"), 32768) == pytest.approx(1212.7e6, rel=1e-3)
    fp8 = floors.kv_bytes(preset("gpt-oss-20b"), 8192, full_fp8=True)
    assert fp8 == 12 * (8192 * 2 * 8 * 66 + 128 * 2 * 8 * 64 * 2)
    sent = floors.all_reduce_bytes(preset("gpt-oss-120b"), 8192, 4)
    assert sent / H200.nvlink_bytes_per_s == pytest.approx(157e-6, rel=5e-3)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 4.0), (8, 28.7), (32, 81.7), (128, 125.8)])
def test_expected_experts(tokens: int, experts: float) -> None:
    assert floors.expected_experts(preset("gpt-oss-120b"), tokens) == pytest.approx(experts, rel=2e-3)


def test_the_busiest_rank_against_drawn_routings() -> None:
    shape, rng, ranks = preset("gpt-oss-20b"), random.Random(0), 4
    for tokens in (1, 4, 16):
        largest = 0.0
        for _ in range(2000):
            chosen = {e for _ in range(tokens) for e in rng.sample(range(shape.num_experts), 4)}
            counts = [sum(e // 8 == rank for e in chosen) for rank in range(ranks)]
            largest += max(counts) / 2000
        assert floors.busiest_rank_experts(shape, tokens, ranks) == pytest.approx(largest, rel=0.06)


def test_memory_of_a_decode_worker() -> None:
    model = uncalibrated("gpt-oss-120b")
    # 139 GiB - 8 GB - 65.25 GB = 76.0 GB; a sequence of 8,192 tokens is 18 * 2048 * (8192 + 192) = 309.1 MB.
    assert model.largest_batch(ONE, 8192) == 245
    assert model.largest_batch(ONE, 32768) < 128 < uncalibrated("gpt-oss-20b").largest_batch(ONE, 32768) * 2


def test_prices_by_hand() -> None:
    # 2,964 tokens/s on one GPU at $3.00 an hour.
    assert price_per_million(1, 3.0, 2964) == pytest.approx(0.2812, rel=1e-3)
    targets = Targets(1.0, 0.02, 4000, 500, 10)
    best = plans(uncalibrated("gpt-oss-20b"), targets)[0]
    assert best.input_price == pytest.approx(best.prefill.gpus * 3.0 / 3600 / 40_000 * 1e6)
    assert best.output_price == pytest.approx(best.decode.gpus * 3.0 / 3600 / 5_000 * 1e6)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["gpt-oss-20b", "gpt-oss-120b"]),
    rate=st.floats(0.1, 300.0),
    more=st.floats(1.0, 4.0),
    isl=st.integers(100, 20_000),
    osl=st.integers(2, 2000),
)
def test_more_requests_never_need_fewer_gpus(
    model: str, rate: float, more: float, isl: int, osl: int
) -> None:
    few = plans(uncalibrated(model), Targets(2.0, 0.03, isl, osl, rate))
    many = plans(uncalibrated(model), Targets(2.0, 0.03, isl, osl, rate * more))
    assert many[0].gpus >= few[0].gpus


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["gpt-oss-20b", "gpt-oss-120b"]),
    layout=st.sampled_from(LAYOUTS),
    itl_ms=st.floats(2.0, 60.0),
    tighter=st.floats(0.3, 1.0),
)
def test_a_tighter_itl_never_gives_a_larger_batch(
    model: str, layout: Layout, itl_ms: float, tighter: float
) -> None:
    def batch(itl_s: float) -> int:
        pool = size_decode(uncalibrated(model), layout, Targets(1.0, itl_s, 4000, 500, 10))
        return 0 if pool is None else pool.batch

    assert batch(itl_ms * tighter / 1e3) <= batch(itl_ms / 1e3)


def test_a_step_keeps_its_target_and_the_next_batch_does_not() -> None:
    model, targets = uncalibrated("gpt-oss-120b"), Targets(1.0, 0.015, 4000, 500, 10)
    pool = size_decode(model, ONE, targets)
    assert pool is not None
    assert pool.step_s <= targets.itl_s < model.decode_step_s(ONE, pool.batch + 1, 4250)


def test_what_cannot_be_met_is_said() -> None:
    with pytest.raises(NoPlan, match=r"itl 0\.1 ms"):
        plans(uncalibrated("gpt-oss-120b"), Targets(1.0, 1e-4, 4000, 500, 1))
    with pytest.raises(NoPlan, match="ttft 1 ms"):
        plans(uncalibrated("gpt-oss-120b"), Targets(1e-3, 0.05, 4000, 500, 1))
    with pytest.raises(NoPlan, match="positive"):
        Targets(1.0, 0.05, 4000, 500, 0.0)


def test_erlang_and_the_square_root_rule() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)  # M/M/1 waits with probability rho
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(3, 3.0) == 1.0
    # Square-root staffing of a huge pool: Halfin and Whitt's limit, which a sum over every server never ends.
    normal = NormalDist()
    limit = 1 / (1 + normal.cdf(1) / normal.pdf(1))
    assert erlang_c(10**10 + 10**5, 1e10) == pytest.approx(limit, rel=1e-4)
    assert erlang_c(10**6, 1e3) == 0.0
    assert wait_quantile_s(1, 0.5, 1.0, 1.0, 0.9) == pytest.approx(math.log(5) / 0.5)
    assert wait_quantile_s(1, 2.0, 1.0, 1.0, 0.9) == math.inf
    assert fewest_servers(10, 0.1, 1.0, 10.0, 0.95) == 2
    assert staffed(100.0, 10, 0.0) == 10
    assert staffed(100.0, 10, 2.0) == 12
    assert mean_wait_md1_s(0.8, 1.0) == pytest.approx(2.0)


def test_efficiencies_add_up() -> None:
    parts = {KernelClass.DENSE_DECODE: floors.Work(bytes=4.8e9, bf16_flop=990e9, launches=10)}
    assert Efficiencies().seconds(parts) == pytest.approx(10 * 2.5e-6 + 1.15e-3 + 1.5e-3)
