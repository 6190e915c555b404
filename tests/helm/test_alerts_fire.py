"""Prometheus' own tool checks the rules, and plays series against each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rendered_chart import ROOT

RULES = ROOT / "docker/prometheus/alerts.yaml"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(
    PROMTOOL is None and "CI" not in os.environ, reason="needs promtool, of Debian's package prometheus"
)

Series = dict[str, str]
M = 'model_name="m"'
TTFT, ITL = "antiphon_time_to_first_token_seconds", "antiphon_inter_token_latency_seconds"
STAGE = "antiphon_stage_duration_seconds_bucket"


def worker(metric: str, values: str, *, role: str = "decode", index: int = 0) -> Series:
    return {f'antiphon_worker_{metric}{{{M}, role="{role}", worker="{role}-{index}"}}': values}


def member(values: str, *, index: int = 0) -> Series:
    return {f'antiphon_member_up{{{M}, role="decode", worker="decode-{index}"}}': values}


def stage(name: str, bound: str, bigger: str) -> Series:
    """A histogram of one stage whose every observation lies between two bounds."""
    labels = f'{M}, stage="{name}"'
    return {
        f'{STAGE}{{{labels}, le="{bound}"}}': "0x120",
        f'{STAGE}{{{labels}, le="{bigger}"}}': "0+10x120",
        f'{STAGE}{{{labels}, le="+Inf"}}': "0+10x120",
    }


def within(metric: str, bound: str, fast_of_100: int) -> Series:
    return {
        f'{metric}_bucket{{{M}, le="{bound}"}}': f"0+{fast_of_100}x480",
        f"{metric}_count{{{M}}}": "0+100x480",
    }


def answers(failed_of_1000: int) -> Series:
    name = f'antiphon_requests_total{{{M}, endpoint="chat", status_code='
    return {
        f'{name}"200"}}': f"0+{1000 - failed_of_1000}x480",
        f'{name}"503"}}': f"0+{failed_of_1000}x480",
    }


def held(pages: int, requests: int) -> Series:
    labels = f'{M}, engine="decode-0", role="decode"'
    return {
        f"antiphon_kv_pages_held{{{labels}}}": f"{pages}x30",
        f"antiphon_worker_requests{{{labels}}}": f"{requests}x30",
    }


def sent(bytes_per_minute: float, busy_s: float) -> Series:
    labels = f'{M}, engine="prefill-0", role="prefill"'
    return {
        f"antiphon_kv_transfer_bytes_sum{{{labels}}}": f"0+{bytes_per_minute}x60",
        f"antiphon_kv_transfer_seconds_sum{{{labels}}}": f"0+{busy_s}x60",
    }


@dataclass(frozen=True, slots=True)
class Case:
    """Series that fire an alert at ``minute`` with these labels, and series that must not."""

    alert: str
    fires: Series
    quiet: Series
    minute: int
    labels: dict[str, str]


DECODE = {"model_name": "m", "role": "decode", "worker": "decode-0"}
MODEL = {"model_name": "m"}
CASES = (
    Case(
        "AntiphonNoReadyPair",
        {
            f'antiphon_ready_pairs{{{M}, instance="a"}}': "0x20",
            f'antiphon_ready_pairs{{{M}, instance="b"}}': "0x20",
        },
        {
            f'antiphon_ready_pairs{{{M}, instance="a"}}': "0x20",
            f'antiphon_ready_pairs{{{M}, instance="b"}}': "1x20",
        },
        4,
        MODEL,
    ),
    Case(
        "AntiphonMetricsMissing",
        {
            f'antiphon_build_info{{{M}, role="{role}"}}': "1x20"
            for role in ("prefill", "decode", "supervisor")
        },
        {f'antiphon_build_info{{{M}, role="router"}}': "1x20"},
        6,
        {"role": "router"},
    ),
    Case(
        "AntiphonWorkerDown",
        worker("up", "0x20") | member("0x20"),
        # One that the supervisor has taken out of its pool, which was made smaller; and one that is up.
        worker("up", "0x20") | worker("up", "1x20", index=1) | member("1x20", index=1),
        6,
        DECODE,
    ),
    Case("AntiphonCircuitOpen", worker("circuit_state", "1x20"), worker("circuit_state", "2x20"), 6, DECODE),
    Case(
        "AntiphonQueueFull",
        # More urgent requests come, so that the full queue turns others away that wait.
        {
            f'antiphon_rejections_total{{{M}, reason="queue_full"}}': "0x20",
            f'antiphon_rejections_total{{{M}, reason="displaced"}}': "0+10x20",
        },
        {f'antiphon_rejections_total{{{M}, reason="shutdown"}}': "0+10x20"},
        10,
        MODEL,
    ),
    Case(
        "AntiphonPrefillBacklog",
        stage("prefill_queue", "5.0", "10.0"),
        stage("prefill_queue", "0.1", "0.25"),
        20,
        MODEL,
    ),
    Case(
        "AntiphonDecodeCacheFull",
        worker("kv_cache_usage_ratio", "0.97x30") | worker("kv_cache_usage_ratio", "0.99x30", index=1),
        worker("kv_cache_usage_ratio", "0.97x30") | worker("kv_cache_usage_ratio", "0.5x30", index=1),
        15,
        MODEL,
    ),
    Case(
        "AntiphonTransferSlow", stage("transfer", "1.0", "2.5"), stage("transfer", "0.01", "0.025"), 20, MODEL
    ),
    Case(
        "AntiphonRetriesRising",
        {
            f'antiphon_retries_total{{{M}, leg="decode", reason="died"}}': "0+5x60",
            f'antiphon_disagg_decisions_total{{{M}, decision="decode", reason="load"}}': "0+100x60",
        },
        {
            f'antiphon_retries_total{{{M}, leg="decode", reason="died"}}': "0+1x60",
            f'antiphon_disagg_decisions_total{{{M}, decision="decode", reason="load"}}': "0+100x60",
        },
        40,
        MODEL,
    ),
    Case(
        "AntiphonRepairsRising",
        {
            f'antiphon_output_repairs_total{{{M}, kind="end_missing"}}': "0+20x120",
            f'antiphon_request_success_total{{{M}, finished_reason="stop"}}': "0+100x120",
        },
        {
            f'antiphon_output_repairs_total{{{M}, kind="end_missing"}}': "0+5x120",
            f'antiphon_request_success_total{{{M}, finished_reason="stop"}}': "0+100x120",
        },
        75,
        MODEL,
    ),
    Case(
        "AntiphonPoolDown",
        {f'antiphon_member_up{{{M}, role="decode", worker="decode-{i}"}}': "0x20" for i in (0, 1)},
        {f'antiphon_member_up{{{M}, role="decode", worker="decode-{i}"}}': f"{i}x20" for i in (0, 1)},
        4,
        {"model_name": "m", "role": "decode"},
    ),
    Case(
        "AntiphonRestarting",
        {f'antiphon_member_restarts_total{{{M}, role="decode", worker="decode-0"}}': "0+1x60"},
        {f'antiphon_member_restarts_total{{{M}, role="decode", worker="decode-0"}}': "0 0 1x60"},
        40,
        {"model_name": "m", "worker": "decode-0"},
    ),
    Case(
        "AntiphonPagesLeaking",
        held(pages=7, requests=0),
        held(pages=7, requests=1),
        15,
        {"model_name": "m", "engine": "decode-0"},
    ),
    Case(
        "AntiphonTransferFallback",
        {f'antiphon_kv_peers_over_tcp{{{M}, engine="decode-0", role="decode"}}': "1x30"},
        {f'antiphon_kv_peers_over_tcp{{{M}, engine="decode-0", role="decode"}}': "0x30"},
        8,
        {"model_name": "m", "engine": "decode-0"},
    ),
    Case(
        "AntiphonSlowWrites",
        sent(bytes_per_minute=1_000_000, busy_s=10),
        sent(bytes_per_minute=1_000_000, busy_s=0.1),
        25,
        {"model_name": "m", "engine": "prefill-0"},
    ),
    # 10 % above the objective burns the budget six times too fast, but not fourteen times.
    Case("AntiphonTtftBudgetFastBurn", within(TTFT, "2.0", 80), within(TTFT, "2.0", 90), 70, MODEL),
    Case("AntiphonTtftBudgetSlowBurn", within(TTFT, "2.0", 90), within(TTFT, "2.0", 95), 400, MODEL),
    Case("AntiphonItlBudgetFastBurn", within(ITL, "0.05", 80), within(ITL, "0.05", 90), 70, MODEL),
    Case("AntiphonItlBudgetSlowBurn", within(ITL, "0.05", 90), within(ITL, "0.05", 95), 400, MODEL),
    Case("AntiphonErrorBudgetFastBurn", answers(20), answers(10), 70, MODEL),
    Case("AntiphonErrorBudgetSlowBurn", answers(10), answers(5), 400, MODEL),
)


def rules() -> list[dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None, "promtool is not installed"
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)


def test_the_rules_and_their_texts_are_valid() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert sorted(case.alert for case in CASES) == sorted(str(rule["alert"]) for rule in rules())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_it_should_and_only_then(case: Case, tmp_path: Path) -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == case.alert)
    labels = rule["labels"]
    assert isinstance(labels, dict)
    # Texts are checked above; here they would have to be repeated to the letter.
    bare = {key: value for key, value in rule.items() if key != "annotations"}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [bare]}]}))

    def played(series: Series, expected: list[dict[str, object]], minute: int) -> dict[str, object]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": expected}],
        }

    firing: list[dict[str, object]] = [{"exp_labels": {**case.labels, **labels}}]
    tests = [played(case.fires, firing, case.minute), played(case.quiet, [], case.minute)]
    # Not at once: every alert waits whether it passes by itself.
    tests.append(played(case.fires, [], 1))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
