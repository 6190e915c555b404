"""The whole road of a sweep, with a small model on a CPU: every kind of layout, through the real engine."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from pathlib import Path

import pytest

from antiphon.benchmarks.records import Layout, load_records
from antiphon.benchmarks.sweep import ranks
from antiphon.benchmarks.sweep.command import Sizes, SweepIncomplete, run_command
from antiphon.benchmarks.sweep.meter import Effort, NotMeasurable, RankMeter
from antiphon.benchmarks.sweep.points import Point, layouts_for
from antiphon.benchmarks.sweep.ranks import CachePages, pages_for
from antiphon.benchmarks.sweep.replicas import PRELOADED, ReplicaMeter
from antiphon.model.config import preset

EFFORT = Effort(steps=3, repeats=1, chunk_tokens=128)


def sweep(output: Path, layouts: list[str], docs: Path | None = None, *, at_once: bool = False) -> None:
    run_command(
        ["tiny"],
        output,
        layouts=layouts,
        device="cpu",
        ranks=2,
        sizes=Sizes((130,), (2,), (140,)),
        effort=EFFORT,
        docs=docs,
        at_once=at_once,
    )


def test_every_layout_is_measured_once_and_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, layouts = tmp_path / "results" / "sweep.json", ["TP1", "TP2 EP2", "TP1 DP2"]
    sweep(output, layouts, tmp_path / "docs")
    records = load_records(output)
    assert [(each.layout, each.input_tokens, each.batch) for each in records] == [
        (layout, tokens, batch) for layout in layouts for tokens, batch in ((130, 1), (None, 2))
    ]
    for record in records:
        assert record.device == "CPU"
        assert record.floor is not None
        assert record.value > record.floor > 0
    replicas = records[-1].extra["replicas_ms"]
    assert isinstance(replicas, list)
    assert len(replicas) == 2
    assert max(replicas) == records[-1].value
    assert "Pareto front" in capsys.readouterr().out
    assert "No runs" in (tmp_path / "docs" / "benchmarks.md").read_text()
    sweep(output, layouts)
    assert "0 measured, 6 known before, 0 failed" in capsys.readouterr().out
    assert load_records(output) == records


def test_layouts_at_the_same_time_give_the_same_points_and_replicas_bring_one_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, layouts = tmp_path / "sweep.json", ["TP1", "TP2 EP2", "TP1 DP2"]
    sweep(output, layouts, at_once=True)
    assert "6 measured, 0 known before, 0 failed, 0 left" in capsys.readouterr().out
    records = {(each.layout, each.batch): each for each in load_records(output)}
    assert len(records) == 6
    one, both = records["TP1", 2], records["TP1 DP2", 2]
    assert (one.extra["at_once"], one.value) == ("TP1 DP2", both.extra["replicas_ms"][0])  # type: ignore[index]
    assert "at_once" not in records["TP2 EP2", 2].extra
    sweep(output, layouts, at_once=True)
    assert "0 measured, 6 known before" in capsys.readouterr().out


def test_a_layout_that_cannot_be_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    """Three ranks share neither four kv heads nor the pages that two would have."""
    with pytest.raises(SweepIncomplete, match=r"TP3.*3"):
        run_command(
            ["tiny"],
            tmp_path / "sweep.json",
            layouts=["TP3"],
            device="cpu",
            ranks=3,
            sizes=Sizes((130,), (), ()),
            effort=EFFORT,
        )
    assert not load_records(tmp_path / "sweep.json")


def test_what_processes_are_forked_from_has_not_touched_a_gpu() -> None:
    """CUDA cannot be used in a fork of a process that used it, nor are threads forked along."""
    code = f"""
import ctypes, importlib, threading, torch
def refuse(*_, **__): raise SystemExit("CUDA is asked for while modules load")
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice"):
    setattr(torch._C, name, refuse)
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
real = ctypes.CDLL.__init__
def load(self, name=None, *rest, **more):
    if name and "cuda" in str(name): refuse()
    real(self, name, *rest, **more)
ctypes.CDLL.__init__ = load
for each in {PRELOADED!r}:
    importlib.import_module(each)
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_layouts_take_all_devices_and_no_more() -> None:
    assert {layout.name for layout in layouts_for(2)} == {"TP1", "TP2", "TP2 EP2", "TP1 DP2"}
    assert Layout(2, 2, 4) in layouts_for(8)
    assert all(layout.gpus <= 4 for layout in layouts_for(4))


def test_ranks_have_pages_for_the_largest_point() -> None:
    decode = Point("decode_step", "tiny", Layout(2), batch=4, context=1000)
    prompt = Point("prefill", "tiny", Layout(2), input_tokens=6400)
    # 4 sequences of 1,000 + 16 + 16 + 64 tokens, or 2 of 6,464, in pages of 64 and two to spare.
    assert pages_for(preset("tiny"), [decode], 16, 128) == CachePages(4 * (18 + 2), 4 * 5 + 5)
    assert pages_for(preset("tiny"), [decode, prompt], 16, 128).full == 2 * (101 + 2)


def test_a_replica_that_died_is_named_at_every_point_after_it() -> None:
    here, there = Pipe()
    there.close()
    meter = ReplicaMeter(Layout(dp=1), [here])
    for tokens in (64, 128):
        with pytest.raises(NotMeasurable, match="replica 0 died"):
            meter.measure(Point("prefill", "tiny", Layout(), input_tokens=tokens))


def test_ranks_are_started_once_for_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(2, 2)
    points = [
        Point("prefill", "tiny", layout, input_tokens=130),
        Point("decode_step", "tiny", layout, batch=2, context=140),
    ]
    started: list[ranks.RankPlan] = []
    opened = ranks.open_rank_bench

    def counted(plan: ranks.RankPlan, waiting: object = None) -> AbstractContextManager[ranks.RankBench]:
        started.append(plan)
        return opened(plan)

    monkeypatch.setattr(ranks, "open_rank_bench", counted)
    meter = RankMeter("tiny", layout, points, "cpu", EFFORT)
    try:
        records = [meter.measure(point) for point in points]
    finally:
        meter.close()
    assert [(each.bench, each.layout, each.is_default) for each in records] == [
        ("prefill", "TP2 EP2", True),
        ("decode_step", "TP2 EP2", True),
    ]
    assert len(started) == 1
    assert not multiprocessing.active_children()
