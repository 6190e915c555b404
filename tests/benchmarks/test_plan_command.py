"""What ``antiphon plan`` prints and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.benchmarks.plan.check import SCENARIOS, check, grown
from antiphon.benchmarks.plan.command import run_command
from antiphon.benchmarks.plan.cost_model import build
from antiphon.benchmarks.plan.planner import Targets, plans
from antiphon.cluster.cli import main

TARGETS = Targets(0.5, 0.01, 2000, 200, 30)


def test_plans_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("gpt-oss-20b", TARGETS, results=tmp_path, duration_s=40, output=tmp_path / "plan.json")
    shown = " ".join(capsys.readouterr().out.split())
    assert "every figure is predicted" in shown
    assert shown.count("assumed") > 8
    assert "held" in shown
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["predicted"] is True
    first = document["plans"][0]
    assert first["gpus"] == min(plan["gpus"] for plan in document["plans"])
    prefill, decode = first["prefill"], first["decode"]
    sizes = [pool["workers"] * pool["layout"]["tp"] * pool["layout"]["dp"] for pool in (prefill, decode)]
    assert first["gpus"] == sum(sizes)
    assert len(document["simulation"]) == len(SCENARIOS)
    assert {row["points"] for row in document["basis"]} == {0}


def test_growth_ends_with_a_plan_that_holds() -> None:
    model = build("gpt-oss-20b", [])
    plan = plans(model, TARGETS)[0]
    bursts = SCENARIOS[2]
    tight = Targets(0.12, 0.01, 2000, 200, 30)
    small = type(plan)(plan.model, tight, plan.prefill, plan.decode)
    assert not check(model, small, scenarios=[bursts], duration_s=60, warmup_s=5)[0].holds
    larger = grown(model, small, bursts, duration_s=60, warmup_s=5)
    assert larger is not None
    assert larger.gpus > small.gpus
    assert check(model, larger, scenarios=[bursts], duration_s=20, warmup_s=5)[0].holds
    hopeless = type(plan)(plan.model, Targets(0.001, 0.01, 2000, 200, 30), plan.prefill, plan.decode)
    assert grown(model, hopeless, bursts, duration_s=20, warmup_s=5) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--itl", "100us"], "antiphon: itl 0.1 ms: the quickest layout takes"),
        (["--itl", "8"], "antiphon: itl '8': expected a positive time with its unit"),
        (["--rps", "0"], "antiphon: rps 0: must be a positive number"),
        (["--link", "nan"], "antiphon: link nan: must be a positive number"),
        (["--price", "-2"], "antiphon: price -2: must be a positive number"),
        (["--rps", "1e9"], "antiphon: rps 1e+09: at most 1e+06 requests per second are planned"),
        (["--output", "/proc"], "antiphon: /proc: is a folder, not a file to write"),
        (["--output", "/proc/version/plan.json"], "antiphon: /proc/version: File exists"),
        (["--model", "gpt-2"], "antiphon: 'gpt-2' is not a known model shape"),
        (["--quantile", "2"], "antiphon: lengths are at least 1 token"),
        (["--results", "/nowhere"], "antiphon: /nowhere: no such folder of results"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_a_status(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["antiphon", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_line_and_a_status() -> None:
    """As a process of its own, whose last words these are."""
    command = [sys.executable, "-m", "antiphon.cluster.cli", "bench", "report", "--docs", "/proc/version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("antiphon: /proc/version")
    assert done.stderr.count("\n") == 1
