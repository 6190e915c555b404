"""The cost model's fits: laws of kernels, factors of whole steps, and what they do not touch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from antiphon.benchmarks.plan import work
from antiphon.benchmarks.plan.cost_model import CostModel, Group, build
from antiphon.benchmarks.plan.efficiency import ASSUMED, calibrate
from antiphon.benchmarks.plan.fit import leave_one_out, non_negative_fit
from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.plan.planner import LAYOUTS
from antiphon.benchmarks.plan.work import KernelClass
from antiphon.benchmarks.records import RESULTS, Layout, Record, load_results
from antiphon.model.config import preset

ONE = Layout()


@cache
def uncalibrated(model: str) -> CostModel:
    return build(model, [])


def test_a_fit_finds_the_law_it_was_made_from() -> None:
    rows = [
        ((1.0, m, c), 9e-6 + 1.2 * m + 2.0 * c)
        for m, c in itertools.product((1e-5, 1e-4, 3e-4), (1e-6, 8e-5))
    ]
    assert non_negative_fit(rows) == pytest.approx((9e-6, 1.2, 2.0), rel=1e-6)
    errors = leave_one_out(rows)
    assert errors is not None
    assert errors.worst < 1e-6
    # (2 c - 1)^2 + 4 (c - 1)^2 is least at 3 / 4.
    assert non_negative_fit([((2.0,), 1.0)], 4.0) == pytest.approx((0.75,))
    falling = [((1.0, float(x)), 10.0 - x) for x in range(5)]
    found = non_negative_fit(falling)
    assert found[1] == 0.0
    assert found[0] == pytest.approx(sum(1 / y for _, y in falling) / sum(1 / y**2 for _, y in falling))


def kernel_record(batch: int, floor_us: float, value_us: float) -> Record:
    point = {"batch": batch, "kernel": "moe_streamed", "floor": floor_us}
    return Record("kernel", "gpt-oss-20b", "TP1", H200.name, "c", "d", value_us, "us", **point)  # type: ignore[arg-type]


def test_roads_change_where_the_model_s_do() -> None:
    from antiphon.kernels.dense import skinny
    from antiphon.kernels.moe.regime import streams_4_bit

    assert [work.is_fused(ONE, batch) for batch in (skinny.MAX_TOKENS, skinny.MAX_TOKENS + 1)] == [
        True,
        False,
    ]
    assert not work.is_fused(Layout(2), 1)
    for model in ("gpt-oss-20b", "gpt-oss-120b"):
        shape = preset(model)
        for layout, tokens in itertools.product(
            (ONE, Layout(2), Layout(2, 2)), (1, 80, 81, 128, 129, 256, 257)
        ):
            alone = layout is ONE
            streamed = work.chunk_road(shape, layout, tokens, resident_fp8=False) == "streamed"
            assert streamed == streams_4_bit(tokens, shape.num_experts, alone), (model, layout, tokens)
            experts = {KernelClass.MOE_DECODE, KernelClass.MOE_MIXED} & work.decode_step(
                shape, layout, tokens, 1
            ).keys()
            assert experts == {KernelClass.MOE_DECODE if streamed else KernelClass.MOE_MIXED}
    assert work.chunk_road(preset("gpt-oss-20b"), ONE, 8192, resident_fp8=True) == "fp8"
    assert work.chunk_road(preset("gpt-oss-20b"), ONE, 256, resident_fp8=True) == "streamed"


@pytest.mark.parametrize(("batch", "small"), [(16, 0), (17, 2)])
def test_small_kernels_have_launches_of_their_own_where_nothing_is_fused(batch: int, small: int) -> None:
    shape, kind = preset("gpt-oss-20b"), KernelClass.SMALL_DECODE
    alone = work.decode_step(shape, ONE, batch, 8192)
    assert (alone[kind].launches if kind in alone else 0) == small * shape.num_hidden_layers
    ranks = work.decode_step(shape, Layout(2), batch, 8192)  # norms are in the sums
    assert ranks[kind].launches == shape.num_hidden_layers
    assert ranks[KernelClass.ALL_REDUCE_SMALL].launches == 2 * shape.num_hidden_layers


def test_sums_over_ranks_are_fitted_to_the_kind_that_is_taken() -> None:
    def sums(rows: int, value_us: float, kernel: str = "peer memory, one launch") -> Record:
        return Record("all_reduce", "", "TP2", H200.name, "c", "d", value_us, "us", batch=rows, kernel=kernel)

    def law_s(rows: int) -> float:  # two ranks of a hidden size of 2,880 in bf16
        return 6e-6 + 2.0 * rows * 2880 * 2 / H200.nvlink_bytes_per_s

    taken = [sums(rows, law_s(rows) * 1e6) for rows in (1, 8, 32, 128, 512, 1024, 8192)]
    quicker = [sums(rows, law_s(rows) * 5e5, "peer memory, pushed") for rows in (1, 8, 32, 128)]
    laws = calibrate([*quicker, *taken]).laws
    for kind, points in ((KernelClass.ALL_REDUCE_SMALL, 4), (KernelClass.ALL_REDUCE_LARGE, 3)):
        law = laws[kind]
        assert law.points == points
        assert (law.launch_s, law.memory) == pytest.approx((6e-6, 2.0), rel=1e-6)


def test_a_worker_s_prompts_are_predicted_by_its_defaults() -> None:
    """FP8 experts that were held tell of themselves, and nothing of a worker that holds none."""
    model = uncalibrated("gpt-oss-20b")

    def prompt(tokens: int, factor: float, resident: str) -> Record:
        groups = model.prefill_groups_s(ONE, tokens - 1, resident_fp8=resident != "mxfp4")
        value_s = factor * sum(groups) + model.decode_step_s(ONE, 1, tokens)
        more = {"input_tokens": tokens, "extra": {"resident_weights": resident}}
        return Record("prefill", "gpt-oss-20b", "TP1", H200.name, "c", "d", value_s * 1e3, "ms", **more)  # type: ignore[arg-type]

    lengths = [2**power for power in range(10, 17)]
    default = [prompt(tokens, 1.0, "mxfp4") for tokens in lengths]
    told = [prompt(tokens, 1.0, "mxfp4 and fp8") for tokens in lengths]
    assert [each.is_default for each in (default[0], told[0])] == [True, False]
    for known in (default, told, default + told):
        found = build("gpt-oss-20b", known)
        assert found.prefill_correction.points == len(known)
        for tokens in (1023, 8191, 65535):
            assert found.prefill_s(ONE, tokens) == pytest.approx(model.prefill_s(ONE, tokens), rel=1e-6)
    slower = [replace(each, value=each.value * 1.3) for each in told]
    experts = build("gpt-oss-20b", default + slower).prefill_correction.factors[Group.FP8_EXPERTS]
    assert experts > 1.2
    assert build("gpt-oss-20b", default + slower).prefill_s(ONE, 8191) == pytest.approx(
        model.prefill_s(ONE, 8191), rel=0.05
    )


def test_measurements_replace_assumptions_and_only_theirs() -> None:
    few = [kernel_record(1, 11, 23.7), kernel_record(8, 59.7, 85.7)]
    assert calibrate(few).laws[KernelClass.MOE_DECODE] == ASSUMED[KernelClass.MOE_DECODE]
    enough = [*few, kernel_record(32, 87.2, 125.4), kernel_record(128, 88.1, 164.4)]
    laws = calibrate(enough).laws
    assert laws[KernelClass.MOE_DECODE].points == 4
    assert laws[KernelClass.MOE_DECODE].held_out is not None
    assert laws[KernelClass.DENSE_DECODE] is ASSUMED[KernelClass.DENSE_DECODE]
    elsewhere = [Record(**{**_fields(r), "device": "NVIDIA H100"}) for r in enough]  # type: ignore[arg-type]
    assert not calibrate(elsewhere).laws[KernelClass.MOE_DECODE].measured


def test_attention_is_fitted_by_its_floors_and_the_fastest_variant() -> None:
    def attention(shape: str, floor_us: float, value_us: float, kernel: str = "decode full") -> Record:
        more = {"kernel": kernel, "floor": floor_us, "extra": {"shape": shape}}
        return Record("kernel", "", "TP1", H200.name, "c", "d", value_us, "us", **more)  # type: ignore[arg-type]

    points = [(f"B={b} ctx=8192", 3.5 * b, 6.0 + 1.05 * 3.5 * b) for b in (1, 8, 32, 128)]
    measured = [attention(f"{shape} s=16", floor, value) for shape, floor, value in points]
    slower = [
        attention(f"{shape} s=3", floor, value * 2, "decode full pdl") for shape, floor, value in points
    ]
    law = calibrate([*slower, *measured, *slower]).laws[KernelClass.ATTENTION_DECODE]
    assert (law.points, law.compute) == (4, ASSUMED[KernelClass.ATTENTION_DECODE].compute)
    assert (law.launch_s, law.memory) == pytest.approx((6e-6, 1.05), rel=1e-6)


def _fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in Record.__dataclass_fields__}


def test_whole_steps_correct_each_group_and_show_their_error() -> None:
    model = uncalibrated("gpt-oss-20b")
    factors = (1.1, 1.3, 1.0, 0.8, 1.0, 1.2, 0.9, 1.0)

    def step(layout: Layout, batch: int, context: int, off: float = 1.0) -> Record:
        groups = model.decode_groups_s(layout, batch, context)
        value = off * sum(f * s for f, s in zip(factors, groups, strict=True)) * 1e3
        more = {"batch": batch, "context": context}
        return Record("decode_step", "gpt-oss-20b", layout.name, H200.name, "c", "d", value, "ms", **more)  # type: ignore[arg-type]

    points = list(itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (8192, 32768)))
    measured = [step(ONE, batch, context) for batch, context in points]
    corrected = build("gpt-oss-20b", measured)
    # A little is given up to the pull towards 1, and more of what is a small part of every step.
    found = corrected.decode_correction.factors
    for group in (Group.ATTENTION, Group.EXPERTS, Group.FUSED):
        assert found[group] == pytest.approx(factors[group], rel=0.12)
    assert (found[Group.FP8_EXPERTS], found[Group.RANKS]) == pytest.approx((1.0, 1.0))  # nobody knows
    assert corrected.decode_correction.held_out is not None
    assert corrected.decode_correction.held_out.worst < 0.03
    groups = model.decode_groups_s(ONE, 64, 8192)
    expected = sum(f * s for f, s in zip(factors, groups, strict=True))
    assert corrected.decode_step_s(ONE, 64, 8192) == pytest.approx(expected, rel=0.02)
    assert build("gpt-oss-20b", measured[:5]).decode_correction.points == 0
    two = build("gpt-oss-20b", [*measured, *(step(Layout(2), batch, 8192, 1.1) for batch in (1, 8, 32))])
    across = two.decode_correction.layout_held_out
    assert across is not None
    assert across.median == pytest.approx(1 - 1 / 1.1, abs=0.03)
    assert two.decode_correction.layout_points == 3
    assert two.decode_correction.model_held_out is None
    large = [replace(each, model="gpt-oss-120b", value=20.0) for each in measured[:3]]
    other = build("gpt-oss-20b", [*measured, *large]).decode_correction
    assert (other.model_points, other.layout_points) == (3, 0)
    expected = corrected.decode_correction.apply(uncalibrated("gpt-oss-120b").decode_groups_s(ONE, 2, 8192))
    assert other.model_held_out is not None
    assert other.model_held_out.worst >= abs(expected * 1e3 / 20.0 - 1) - 1e-9


def test_terms_that_hardly_vary_keep_their_assumption() -> None:
    def logits(batch: int, value_us: float) -> Record:
        more = {"batch": batch, "kernel": "logits", "floor": 241.0 + batch / 10}
        return Record("kernel", "gpt-oss", "TP1", H200.name, "c", "d", value_us, "us", **more)  # type: ignore[arg-type]

    law = calibrate([logits(1, 280.0), logits(8, 281.0), logits(32, 283.0)]).laws[KernelClass.UNEMBEDDING]
    assert law.launch_s == ASSUMED[KernelClass.UNEMBEDDING].launch_s
    assert law.memory == pytest.approx(270 / 241, rel=0.02)


def test_a_kernel_that_was_replaced_does_not_count() -> None:
    def attention(kernel: str, tokens: int, factor: float) -> Record:
        floor_us = 555.0 * (tokens / 8192) ** 2
        extra = {} if kernel == "attention full" else {"shape": f"T={tokens} ctx={tokens}"}
        more = {"kernel": kernel, "floor": floor_us, "extra": extra}
        if kernel == "attention full":
            more["input_tokens"] = tokens
        return Record("kernel", "gpt-oss", "TP1", H200.name, "c", "d", 10 + floor_us * factor, "us", **more)  # type: ignore[arg-type]

    old = [attention("prefill full", tokens, 3.0) for tokens in (1024, 2048, 8192, 16384)]
    new = [attention("attention full", tokens, 2.0) for tokens in (1024, 8192, 32768)]
    assert calibrate(old).laws[KernelClass.ATTENTION_PREFILL].compute == pytest.approx(3.0)
    law = calibrate(old + new).laws[KernelClass.ATTENTION_PREFILL]
    assert law.points == 3
    assert law.compute == pytest.approx(2.0)


def test_the_project_s_own_figures_are_predicted_as_well_as_is_wanted() -> None:
    model = build("gpt-oss-120b", load_results(RESULTS))
    for whole in (model.decode_correction, model.prefill_correction):
        assert whole.points > 50
        assert whole.held_out is not None
        assert whole.held_out.median <= 0.10
        assert whole.held_out.worst <= 0.25
        assert whole.layout_points > 30
        assert whole.layout_held_out is not None
        assert whole.layout_held_out.median <= 0.15


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_times_never_fall_with_the_batch_or_the_prompt(model: str) -> None:
    """Unless the experts' kernels change; the others do between 16 and 17 sequences."""
    found = build(model, load_results(RESULTS))
    for layout, context in itertools.product(LAYOUTS, (1, 8192, 131_072)):
        change = work.last_streamed(found.shape, layout)
        for batches in (range(1, change + 1), range(change + 1, 300)):
            steps = [found.decode_step_s(layout, batch, context) for batch in batches]
            assert steps == sorted(steps), layout.name
    for layout in LAYOUTS:
        change = work.last_streamed(found.shape, layout)
        for lengths in (range(1, change + 1, 7), range(change + 1, 2100, 7)):
            prompts = [found.prefill_s(layout, tokens) for tokens in lengths]
            assert prompts == sorted(prompts), layout.name
