"""The measurement of one GPU as far as a machine without one goes: what runs, is kept and is left out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from antiphon.benchmarks import model_choices, one_gpu
from antiphon.benchmarks.engine_model import make_bench
from antiphon.benchmarks.parts import Part, run, run_together
from antiphon.benchmarks.records import load_records


def test_what_failed_its_tests_is_not_measured() -> None:
    good = dict.fromkeys(one_gpu.TESTS, True)
    assert one_gpu.passed_ways(good) == list(one_gpu.WAYS)
    assert one_gpu.passed_ways(good | {"model": False}) == list(one_gpu.WAYS)
    assert one_gpu.passed_ways(good | {"tiles": False}) == ["default", "projections", "launched"]
    assert one_gpu.passed_ways(good | {"graphs": False}) == ["launched"]
    named = {way.name for resident in (True, False) for way in model_choices.ways_of(resident)}
    assert named == set(one_gpu.WAYS)
    for file, _ in one_gpu.TESTS.values():
        assert (Path(__file__).parents[1] / "gpu" / file).exists()


def test_a_small_model_is_measured_and_kept_point_by_point(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--device", "cpu", "--decode", "64:1", "--steps", "4"]
    arguments += ["--prompts", "64", "--ways", "default,launched", "--repeats", "2", "--out", str(tmp_path)]
    assert model_choices.main(arguments) in (0, 1)  # the spread of a tiny model's experts may miss its bound
    kept = load_records(tmp_path / model_choices.DEFAULTS)
    assert [(record.bench, record.input_tokens) for record in kept] == [
        ("decode_step", None),
        ("prefill", 64),
    ]
    (other,) = load_records(tmp_path / model_choices.CHOICES)
    assert other.extra["choices"] == "launched"
    assert (kept[1].extra["graphed_chunk_tokens"], other.extra["graphed_chunk_tokens"]) == (64, 0)
    lines = one_gpu.table([*kept, other]).splitlines()
    assert len(lines) == 2
    assert "default" in lines[1]
    assert "launched" in lines[1]


def test_what_has_no_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> object:
        raise AssertionError("it was begun")

    bench = make_bench("tiny", torch.device("cpu"))
    point = model_choices.Point("late", never)  # type: ignore[arg-type]
    assert not model_choices.measure(bench, [point], tmp_path, time.monotonic() + 1)
    assert "late: no time is left" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_model_with_one_way_refuses_another() -> None:
    bench = make_bench("tiny", torch.device("cpu"))
    default, apart, launched = model_choices.ways_of(resident=False)
    assert model_choices.under(bench, default) is bench
    assert model_choices.under(bench, launched) is bench
    with pytest.raises(ValueError, match="one way to multiply"):
        model_choices.under(bench, apart)


def test_parts_end_by_themselves_or_are_ended(tmp_path: Path) -> None:
    def part(name: str, code: str) -> Part:
        return Part(name, ("-c", code), 120 if name != "endless" else 1)

    endless = part("endless", "import time; time.sleep(600)")
    parts = [part("good", "print('a'); print('b')"), part("bad", "raise SystemExit(3)"), endless]
    begin = time.monotonic()
    ended = run_together(parts, begin + 120, tmp_path)
    assert ended == {"good": True, "bad": False, "endless": False}
    assert (tmp_path / "good.log").read_text() == "a\nb\n"
    assert not run(endless, time.monotonic() + 120)
    assert time.monotonic() - begin < 240
    assert run(parts[0], time.monotonic() + 120)


def test_the_rehearsal_leaves_ways_that_need_a_gpu_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        one_gpu, "test_parts", lambda folder: [Part(n, ("-c", ""), 30) for n in one_gpu.TESTS]
    )
    arguments = [
        "--device",
        "cpu",
        "--models",
        "tiny",
        "--prompts",
        "64",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    ]
    one_gpu.main([*arguments, "--seconds", "200"])
    said = capfd.readouterr().out
    assert "tiny 64 tokens, launched" in said
    assert "tokens, projections" not in said
    entries = json.loads((tmp_path / model_choices.CHOICES).read_text())
    assert [entry["choices"] for entry in entries] == ["launched"]
