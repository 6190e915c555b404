"""The sweep's grid, its resuming, prices and front; the page of results against the raw figures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.benchmarks import records as records_module
from antiphon.benchmarks.plan.command import basis
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.plan.planner import Targets, plans
from antiphon.benchmarks.records import (
    BENCH_DECODE,
    BENCH_PREFILL,
    RESULTS,
    Layout,
    Record,
    RecordError,
    append_records,
    checkout_commit,
    load_records,
    load_results,
)
from antiphon.benchmarks.report.page import DOCS, render
from antiphon.benchmarks.svg import Axis, Chart, Series
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete, run_command
from antiphon.benchmarks.sweep.meter import Effort, Meter, NotMeasurable, devices_here, engine_opener
from antiphon.benchmarks.sweep.points import Point, grid, layouts_for
from antiphon.benchmarks.sweep.prices import Figure, figure, pareto_front
from antiphon.benchmarks.sweep.run import Outcome, run_sweep

ONE = Layout()


def record(point: Point, value: float, device: str = H200.name) -> Record:
    return Record(
        point.bench,
        point.model,
        point.layout.name,
        device,
        "abc",
        "2026-01-01",
        value,
        "ms",
        batch=point.batch,
        input_tokens=point.input_tokens,
        context=point.context,
    )


class ScriptedMeter:
    """Takes 2 ms for everything but one batch size."""

    def __init__(self) -> None:
        self.seen: list[Point] = []
        self.opened: list[tuple[str, Layout]] = []

    @contextmanager
    def open(self, model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        assert all((point.model, point.layout) == (model, layout) for point in points)
        self.opened.append((model, layout))
        if layout.tp == 8:
            raise NotMeasurable("eight are too many")
        yield self

    def measure(self, point: Point) -> Record:
        self.seen.append(point)
        if point.batch == 64:
            raise NotMeasurable("the step brought no token")
        return record(point, 2.0)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("TP1", ONE),
        ("1 GPU", ONE),
        ("tp2", Layout(2)),
        ("EP4 TP4", Layout(4, 4)),
        ("TP1 EP1", ONE),
        ("TP2 DP2", Layout(2, 1, 2)),
    ],
)
def test_layouts_are_read_and_written(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout
    assert Layout.parse(layout.name) == layout


@pytest.mark.parametrize("text", ["", "four", "TP0", "TP4 EP2", "TP2 PP2", "2 GPUs"])
def test_bad_layouts_are_named(text: str) -> None:
    with pytest.raises(RecordError, match="layout"):
        Layout.parse(text)


def test_records_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.json"
    first = record(Point(BENCH_DECODE, "gpt-oss-20b", ONE, batch=8, context=8192), 3.5)
    second = Record(
        "kernel", "gpt-oss-20b", "TP1", "d", "c", "e", 1.0, "us", kernel="k", extra={"parts": {"a": 1}}
    )
    append_records(path, [first, second])
    append_records(path, [record(Point(BENCH_DECODE, "gpt-oss-20b", ONE, batch=8, context=8192), 3.1)])
    values = {each.kernel: each for each in load_records(path)}
    assert values[None].value == 3.1
    assert values["k"] == second
    assert list(path.parent.iterdir()) == [path]


def test_the_latest_of_a_point_counts_and_bad_files_are_named(tmp_path: Path) -> None:
    point = Point(BENCH_PREFILL, "gpt-oss-20b", ONE, input_tokens=1024)
    old, new = record(point, 9.0).to_json(), record(point, 8.0).to_json() | {"date": "2026-02-01"}
    (tmp_path / "a.json").write_text(json.dumps([new]))
    (tmp_path / "b.json").write_text(json.dumps([old]))
    (tmp_path / "other.json").write_text('{"figures": {}}')
    assert [each.value for each in load_results(tmp_path)] == [8.0]
    (tmp_path / "c.json").write_text(json.dumps([old | {"value": "fast"}]))
    with pytest.raises(RecordError, match=r"c\.json, entry 0"):
        load_results(tmp_path)


def test_files_without_a_checkout_take_their_commit_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_git(folder: Path, arguments: list[str]) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(records_module, "_git", no_git)
    monkeypatch.delenv("ANTIPHON_COMMIT", raising=False)
    assert checkout_commit() == "unknown"
    monkeypatch.setenv("ANTIPHON_COMMIT", "0123abc")
    assert checkout_commit() == "0123abc"


def test_every_figure_of_a_peer_names_its_version() -> None:
    theirs = [each for each in load_results(RESULTS) if each.peer is not None]
    assert theirs
    assert all(each.commit == each.peer for each in theirs)


def test_the_project_s_results_can_be_read() -> None:
    assert any(each.kernel and each.kernel.startswith("moe_streamed") for each in load_results(RESULTS))


def test_the_grid_leaves_out_what_does_not_fit() -> None:
    large = grid(build("gpt-oss-120b", []), layouts_for(2))
    assert {point.layout.name for point in large.points} == {"TP1", "TP2", "TP2 EP2", "TP1 DP2"}
    left_out = {(p.layout.name, p.batch, p.context) for p, _ in large.left_out}
    assert ("TP1", 128, 32768) in left_out
    assert ("TP1", 128, 8192) not in left_out
    assert max(point.input_tokens or 0 for point in large.points) == 131_008
    assert len({point.name for point in large.points}) == len(large.points)


def test_a_sweep_resumes(tmp_path: Path) -> None:
    points = grid(build("gpt-oss-20b", []), [ONE], (1024,), (1, 8), (8192,)).points
    output, lines = tmp_path / "sweep.json", list[str]()
    first = ScriptedMeter()
    run_sweep(points[:2], first.open, output, on_point=lambda point, result: lines.append(result))
    second = ScriptedMeter()
    outcome = run_sweep(points, second.open, output, on_point=lambda point, result: lines.append(result))
    assert second.seen == [points[2]]
    assert outcome.known == list(points[:2])
    assert lines == ["2.000 ms", "2.000 ms", "known", "known", "2.000 ms"]
    again = ScriptedMeter()
    run_sweep(points, again.open, output, again=True, on_point=lambda point, result: None)
    assert again.seen == list(points)
    assert len(load_records(output)) == 3


def test_what_time_was_too_short_for_is_left_for_the_next_run(tmp_path: Path) -> None:
    points = grid(build("gpt-oss-20b", []), [ONE, Layout(2)], (1024,), (1, 8), (8192,)).points
    output, meter = tmp_path / "sweep.json", ScriptedMeter()

    def sweep() -> Outcome:
        return run_sweep(
            points, meter.open, output, on_point=lambda *_: None, time_is_over=lambda: len(meter.seen) >= 2
        )

    outcome = sweep()
    assert (len(outcome.measured), outcome.left, outcome.failed) == (2, list(points[2:]), [])
    assert meter.opened == [("gpt-oss-20b", ONE)]  # the other layout's weights are not even loaded
    meter.seen.clear()
    outcome = sweep()
    assert (len(outcome.known), len(outcome.measured), len(outcome.left)) == (2, 2, len(points) - 4)


def test_the_command_ends_in_time_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meter, output = ScriptedMeter(), tmp_path / "s.json"
    with pytest.raises(SweepIncomplete, match="24 points are left for the next run"):
        run_command(["gpt-oss-20b"], output, layouts=["TP1"], ranks=1, open_meter=meter.open, seconds=-1.0)
    assert not meter.seen
    assert "24 left" in capsys.readouterr().out


def test_a_second_layout_s_figures_show_how_well_it_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = 1.1

    class Predicted(ScriptedMeter):
        """TP1 as the cost model has it; whatever has more ranks takes a tenth longer."""

        def measure(self, point: Point) -> Record:
            plain, one = build(point.model, []), replace(point.layout, dp=1)
            longer = off if one.tp > 1 else 1.0
            if point.input_tokens is not None:
                value_s = plain.prefill_s(one, point.input_tokens - 1)
                value_s += plain.decode_step_s(one, 1, point.input_tokens)
            else:
                value_s = plain.decode_step_s(one, point.batch or 1, point.context or 1)
            return record(point, value_s * 1e3 * longer)

    sizes, docs = Sizes((1024, 8192, 32768), (1, 8, 32, 64), (8192, 32768)), tmp_path / "docs"
    names = ["TP1", "TP2", "TP2 EP2", "TP1 DP2"]
    output = tmp_path / "results" / "sweep.json"
    opener = Predicted().open
    models = ["gpt-oss-20b", "gpt-oss-120b"]
    run_command(models, output, layouts=names, ranks=2, sizes=sizes, open_meter=opener, docs=docs)
    rows = [line for line in capsys.readouterr().out.splitlines() if "other layouts from TP1 alone" in line]
    cells = [[cell.strip() for cell in re.split("[│|]", row)[1:-1]] for row in rows]
    # Replicas of TP1 are TP1 again, and would flatter.
    decode = sum(each.bench == BENCH_DECODE and "TP2" in each.layout for each in load_records(output))
    assert [row[:3] for row in cells] == [
        ["decode step", "other layouts from TP1 alone", str(decode)],
        ["prompt", "other layouts from TP1 alone", "12"],
    ]
    for row in cells:
        assert float(row[3].rstrip("%")) == pytest.approx(100 * (1 - 1 / off), abs=2.5)
    page = (docs / "benchmarks.md").read_text()
    assert (
        f"| decode step | other layouts from TP1 alone | {decode} | {cells[0][3]} | {cells[0][4]} |" in page
    )
    model = build("gpt-oss-20b", load_results(output.parent))
    shown = basis(model, plans(model, Targets(1.0, 0.02, 2000, 200, 5))[0])
    assert {row["class"] for row in shown if "other layouts" in row["class"]} == {
        "whole decode step (other layouts from TP1)",
        "whole prefill (other layouts from TP1)",
    }


def test_failures_are_kept_apart(tmp_path: Path) -> None:
    points = grid(build("gpt-oss-20b", []), [ONE, Layout(8)], (1024,), (32, 64), (8192,)).points
    meter = ScriptedMeter()
    outcome = run_sweep(points, meter.open, tmp_path / "s.json", on_point=lambda point, result: None)
    assert meter.opened == [("gpt-oss-20b", ONE), ("gpt-oss-20b", Layout(8))]
    assert [each.value for each in outcome.measured] == [2.0, 2.0]
    assert {reason for _, reason in outcome.failed} == {"the step brought no token", "eight are too many"}
    assert len(outcome.failed) == 1 + 3


def test_the_command_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meter = ScriptedMeter()
    with pytest.raises(SweepIncomplete, match="2 points failed"):
        run_command(["gpt-oss-20b"], tmp_path / "s.json", layouts=["TP1"], ranks=1, open_meter=meter.open)
    assert "Pareto front" in capsys.readouterr().out
    with pytest.raises(NotMeasurable, match="TP2"):
        run_command(["gpt-oss-20b"], tmp_path / "s.json", layouts=["TP2"], ranks=1, open_meter=meter.open)


def test_without_a_gpu_nothing_is_made_up(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NotMeasurable, match="no CUDA device"):
        devices_here("cuda")
    with pytest.raises(NotMeasurable, match="only measures"):
        run_command(["gpt-oss-20b"], tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()


def test_a_measured_figure_goes_before_a_predicted_one() -> None:
    model = build("gpt-oss-20b", [])
    point = Point(BENCH_DECODE, "gpt-oss-20b", Layout(2), batch=8, context=8192)
    predicted = figure(point, model, [], 3.0)
    assert not predicted.measured
    assert predicted.seconds == model.decode_step_s(Layout(2), 8, 8192)
    measured = figure(point, model, [record(point, 4.0)], 3.0)
    assert measured.measured
    # Two GPUs at $3, eight tokens in 4 ms: 6 / 3600 / 2000 * 1e6.
    assert measured.price_per_million == pytest.approx(0.8333, rel=1e-3)
    assert not figure(point, model, [record(point, 4.0, "NVIDIA H100")], 3.0).measured


def test_the_front_holds_what_nothing_beats() -> None:
    def at(speed: float, price: float) -> Figure:
        return Figure(Point(BENCH_DECODE, "m", ONE, batch=1, context=1), 1 / speed, True, price)

    best = [at(300, 5.0), at(200, 2.0), at(100, 1.0)]
    beaten = [at(150, 3.0), at(90, 1.0), at(300, 6.0)]
    assert pareto_front([*beaten, *best]) == best


def test_the_page_is_that_of_the_figures() -> None:
    for name, text in render().items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is stale: run `antiphon bench report`"


def test_what_is_predicted_is_marked(tmp_path: Path) -> None:
    point = Point(BENCH_DECODE, "gpt-oss-20b", ONE, batch=8, context=8192)
    append_records(tmp_path / "r.json", [record(point, 3.21)])
    page = render(tmp_path)["benchmarks.md"]
    assert "| 3.21 ms, $" in page
    figures = [cell.strip() for line in page.splitlines() for cell in line.split("|") if " ms, $" in cell]
    assert len(figures) > 200
    assert [cell for cell in figures if not cell.startswith("*")] == ["3.21 ms, $0.334"]


def test_charts_are_xml_and_say_when_they_are_empty() -> None:
    chart = Chart(
        "a < b", Axis("x", log=True), Axis("y"), (Series("s & t", [(1, 2), (100, 3), (0, 1)], dashed=True),)
    )
    root = ET.fromstring(chart.render())
    marks = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(marks) == 2
    assert all(0 <= float(mark.attrib["cx"]) <= 640 for mark in marks)
    assert "no figures yet" in Chart("t", Axis("x"), Axis("y")).render()


def test_of_several_ways_to_hold_the_weights_the_fastest_counts() -> None:
    model = build("gpt-oss-20b", [])
    point = Point(BENCH_PREFILL, "gpt-oss-20b", ONE, input_tokens=8192)
    slow, fast = record(point, 90.0), record(point, 70.0)
    assert figure(point, model, [fast, slow], 3.0).seconds == pytest.approx(0.07)


def test_fp8_experts_that_were_held_stand_in_where_the_default_was_not_measured(tmp_path: Path) -> None:
    model = build("gpt-oss-20b", [])
    point = Point(BENCH_PREFILL, "gpt-oss-20b", ONE, input_tokens=8192)
    held = replace(record(point, 50.0), extra={"resident_weights": "mxfp4 and fp8"})
    default = replace(record(point, 70.0), extra={"resident_weights": "mxfp4"})
    assert not point.measured_by(held)  # so the next sweep measures it
    alone, both = figure(point, model, [held], 3.0), figure(point, model, [held, default], 3.0)
    assert (alone.seconds, alone.holds_fp8) == (pytest.approx(0.05), True)
    assert (both.seconds, both.holds_fp8) == (pytest.approx(0.07), False)
    append_records(tmp_path / "r.json", [held])
    assert "| 50 ms, $0.005 r |" in render(tmp_path)["benchmarks.md"]
    append_records(tmp_path / "r.json", [default])
    assert "| 70 ms, $0.007 |" in render(tmp_path)["benchmarks.md"]


def test_ways_that_are_off_by_default_are_nobody_s_figure() -> None:
    def figures(choices: str) -> list[Record]:
        points = [
            Point(BENCH_PREFILL, "gpt-oss-20b", ONE, input_tokens=1024 * n) for n in (1, 8, 32, 64, 128)
        ]
        return [replace(record(point, 1.0), extra={"choices": choices}) for point in points]

    assert build("gpt-oss-20b", figures("")) != build("gpt-oss-20b", [])
    assert build("gpt-oss-20b", figures("launched, tiles of 128")) == build("gpt-oss-20b", [])
    point = Point(BENCH_PREFILL, "gpt-oss-20b", ONE, input_tokens=8192)
    assert [point.measured_by(figures(choices)[1]) for choices in ("", "launched")] == [True, False]


def test_the_engine_s_meter_makes_the_weights_once_as_workers_hold_them_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from antiphon.benchmarks import engine, engine_decode, engine_model
    from antiphon.configs.workers import WorkerConfig

    made: list[str] = []
    looked_at: list[int] = []

    def bench(name: str, device: object, resident_fp8: bool = False) -> SimpleNamespace:
        assert resident_fp8 == (WorkerConfig().fp8_experts == "resident")
        made.append("weights")
        return SimpleNamespace()

    class Steps:
        def __init__(self, bench: object, largest: int, context: int, steps: int) -> None:
            made.append(f"engine of {largest} x {context}")
            self.context = context

        def point(self, batch: int, spread: float) -> tuple[object, ...]:
            return "decode", batch, self.context, spread

    def spread(bench: object, batch: int, context: int) -> float:
        looked_at.append(batch)
        return 1.0

    monkeypatch.setattr(engine_model, "make_bench", bench)
    monkeypatch.setattr(
        engine, "prefill_point", lambda bench, tokens, chunk, repeats, enough_s: ("prefill", tokens)
    )
    monkeypatch.setattr(engine_decode, "DecodeSteps", Steps)
    monkeypatch.setattr(engine_decode, "decode_spread", spread)
    points = grid(build("gpt-oss-20b", []), [ONE], (1024, 2048), (1, 8), (8192, 32768)).points
    with engine_opener("cuda", Effort())("gpt-oss-20b", ONE, points) as meter:
        told: list[object] = [meter.measure(point) for point in points]
    assert told == [
        ("prefill", 1024),
        ("prefill", 2048),
        ("decode", 1, 8192, 1.0),
        ("decode", 8, 8192, 1.0),
        ("decode", 1, 32768, 1.0),
        ("decode", 8, 32768, 1.0),
    ]
    assert made == ["weights", "engine of 8 x 8192", "engine of 8 x 32768"]
    assert looked_at == [1, 8]
