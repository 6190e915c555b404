"""The load generator against a server whose latencies are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.serve.arrivals import WorkloadError
from antiphon.benchmarks.serve.client import ServerUnusable, prepare
from antiphon.benchmarks.serve.command import Options, make_sessions, measure
from antiphon.benchmarks.serve.html import render_html
from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.runner import Limits, run_open_loop

Script = Callable[..., Awaitable[Any]]
SLACK_S = 0.06
"""What may lie between a write and the read of it where the machine has time; it need not have it often."""


def options(url: str, **changes: object) -> Options:
    few = Options(
        url, rate_per_s=40.0, arrivals="constant", requests=12, input_tokens="32", output_tokens="6"
    )
    return replace(few, **changes)  # type: ignore[arg-type]


def tpot_p50_s(observations: list[Observation], tokens: int) -> float:
    """From the time between each answer's first and last event, and the tokens behind its first one."""
    return statistics.median(sum(seen.gaps_s) / tokens for seen in observations)


async def test_latencies_are_those_of_the_script(script: Script) -> None:
    server = await script(first_s=0.1, gap_s=0.03)
    run, document = await measure(options(server.url))
    latency, requests = document["latency_s"], document["requests"]
    assert requests["answered"] == requests["measured"] == 12
    assert requests["input_length_differs"] == requests["output_length_differs"] == 0
    assert latency["itl"]["count"] == 12 * 5
    # One clock: what the server wrote at a time was read just after it, however busy the machine is.
    late: list[list[float]] = [[] for _ in range(6)]
    for seen, written in zip(run.observations, server.written, strict=True):
        read = list(itertools.accumulate(seen.gaps_s, initial=seen.first_s))
        for place, before, after in zip(late, written, read, strict=True):
            place.append(after - before)
        assert seen.ttft_s >= 0.1
    assert all(0 <= min(place) < SLACK_S for place in late)
    assert latency["tpot"]["p50"] == pytest.approx(tpot_p50_s(run.observations, 5))
    assert latency["e2e"]["p50"] >= 0.25
    intended = [seen.intended_s - run.began_s for seen in run.observations]
    assert intended == pytest.approx([i / 40 for i in range(1, 13)])


async def test_bodies_ask_for_exact_lengths(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    await measure(options(server.url, extra={"temperature": 0}))
    assert {len(body["prompt"]) for body in server.bodies} == {32}
    assert all(body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] == 6 for body in server.bodies)
    assert all(body["temperature"] == 0 for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12


async def test_chat_prompts_count_the_format(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0, token_ids=False)
    _, document = await measure(options(server.url, force_length=False))
    assert document["asked"]["prompts"] == "chat"
    assert document["requests"]["input_length_differs"] == 0
    assert all("ignore_eos" not in body for body in server.bodies)


async def test_a_shared_prefix_is_shared_by_groups(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    await measure(options(server.url, shared_prefix_tokens=20, prefix_groups=2, requests=20))
    assert len({tuple(body["prompt"][:20]) for body in server.bodies}) == 2
    assert len({tuple(body["prompt"][20:]) for body in server.bodies}) == 20


async def test_turns_carry_the_conversation(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    _, document = await measure(options(server.url, requests=2, turns=3, turn_tokens="5"))
    assert document["requests"]["answered"] == 6
    lengths = sorted(len(body["prompt"]) for body in server.bodies)
    assert lengths == [32, 32, 43, 43, 54, 54]
    longest = max(server.bodies, key=lambda body: len(body["prompt"]))["prompt"]
    assert sum(longest[:43] == body["prompt"] for body in server.bodies) == 1


async def test_a_stall_shows_in_every_request_that_fell_into_it(script: Script) -> None:
    """With one request in flight at a time, those that queue behind the stall are slow, not absent."""
    server = await script(first_s=0.0, gap_s=0.0, stall_s=0.8)
    run, document = await measure(options(server.url, requests=20, max_in_flight=1, output_tokens="1"))
    # 20 requests intended within 0.5 s: a generator that waits before it counts would see one slow request.
    assert len(document["per_request"]) == len(run.observations) == 20
    for line, seen in zip(document["per_request"], run.observations, strict=True):
        assert line["ttft_s"] >= server.stall_until_s - seen.intended_s - 1e-3
        assert line["ttft_s"] > 0.1
    assert document["generator_health"]["complaints"]


async def test_goodput_counts_what_met_every_objective(script: Script) -> None:
    server = await script(first_s=0.15, gap_s=0.0)
    _, document = await measure(options(server.url, slo=("ttft=60s,itl=60s", "ttft=100ms")))
    loose, tight = document["goodput"]
    assert (loose["good"], loose["share"], tight["good"]) == (12, 1.0, 0)
    assert loose["requests_per_s"] == pytest.approx(12 / document["window_s"])
    assert tight["objectives"] == "ttft 100 ms"


async def test_failures_are_counted_by_reason(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0, refuse=503)
    _, document = await measure(options(server.url, requests=3))
    assert document["requests"]["errors"] == {"HTTP 503: no room": 3}
    server.refuse, server.drop_after = None, 2
    _, document = await measure(options(server.url, requests=3))
    assert document["requests"]["errors"] == {"the stream ended without [DONE]": 3}
    assert document["latency_s"]["ttft"]["p50"] is None


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b"{broken", "an event that is no JSON: "),
        (b"[1]", "an event that is no JSON object"),
        (b'{"error": {"message": "out of pages"}}', "event: out of pages"),
        (b'{"choices": [7]}', "an event of another form"),
        (b'{"choices": [{"delta": {"role": "assistant"}}]}', "no event carried output"),
    ],
)
async def test_answers_that_make_no_sense_are_failures(script: Script, event: bytes, reason: str) -> None:
    server = await script(first_s=0.0, gap_s=0.0, nonsense=event)
    _, document = await measure(options(server.url, requests=1))
    (found,) = document["requests"]["errors"]
    assert found.startswith(reason)


async def test_a_request_beyond_its_time_and_a_run_beyond_its_drain(script: Script) -> None:
    server = await script(first_s=5.0)
    _, document = await measure(options(server.url, requests=2, request_timeout_s=0.1))
    assert document["requests"]["errors"] == {"timeout after 0.1 s": 2}
    _, document = await measure(options(server.url, requests=2, drain_s=0.1))
    assert document["requests"]["errors"] == {"still open when the run ended": 2}


async def test_warm_up_is_sent_and_left_out(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    _, document = await measure(options(server.url, requests=20, warmup_s=0.26))
    assert len(server.bodies) == 20
    assert (document["requests"]["warmup"], document["requests"]["measured"]) == (10, 10)
    assert document["window_s"] == pytest.approx(0.24, abs=1e-6)


async def test_a_closed_loop_keeps_to_its_users(script: Script) -> None:
    server = await script(first_s=0.02, gap_s=0.0)
    run, document = await measure(options(server.url, users=3))
    assert run.peak_in_flight == 3
    assert document["requests"]["answered"] == 12


async def test_tokens_that_come_together_count_as_tokens(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.02, tokens_per_event=3)
    run, document = await measure(options(server.url, output_tokens="9", requests=4))
    assert document["latency_s"]["itl"]["count"] == 4 * 2
    assert document["latency_s"]["tpot"]["p50"] == pytest.approx(tpot_p50_s(run.observations, 8))
    assert {line["output_tokens"] for line in document["per_request"]} == {9}


async def test_server_timing_becomes_stages(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    _, document = await measure(options(server.url))
    stages = document["stages_s"]["server_timing"]
    assert stages["prefill"]["p50"] == pytest.approx(0.0125)
    assert stages["queue"]["count"] == 12


async def test_reports_hold_everything(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.001)
    run, document = await measure(options(server.url, api_key="sk-secret", slo=("e2e=5s",)))
    page = render_html(run, document)
    assert page.count("<svg") == 5
    assert "src=" not in page
    assert "sk-secret" not in page + json.dumps(document)
    assert len(document["per_request"]) == 12


async def cli(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "antiphon.cluster.cli", "bench", "serve", *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_writes_its_reports_or_says_why_not(script: Script, tmp_path: Path) -> None:
    server = await script(first_s=0.0, gap_s=0.001)
    load = [
        "--url",
        server.url,
        "--rate",
        "50",
        "--requests",
        "5",
        "--input-tokens",
        "8",
        "--output-tokens",
        "3",
    ]
    files = ["--output", str(tmp_path / "new" / "r.json"), "--html", str(tmp_path / "r.html")]
    code, out, err = await cli(
        *load, *files, "--slo", "ttft=5s", "--slo", "itl=1s", "--extra", '{"top_p": 0.9}'
    )
    assert (code, err) == (0, "")
    assert "answered 5 of 5" in out
    assert len(json.loads((tmp_path / "new" / "r.json").read_text())["goodput"]) == 2
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert server.bodies[-1]["top_p"] == 0.9
    server.refuse = 429
    code, _, err = await cli(*load)
    assert code == 1
    assert err.startswith("antiphon: none of 5 measured requests was answered: HTTP 429: no room (5)")


@pytest.mark.parametrize("option", ["--output", "--html"])
async def test_a_report_that_could_not_be_written_stops_the_load(
    script: Script, tmp_path: Path, option: str
) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    code, _, err = await cli("--url", server.url, "--requests", "3", option, str(tmp_path))
    assert (code, err) == (1, f"antiphon: {tmp_path}: is a folder, not a file to write\n")
    assert server.bodies == []


async def test_a_trace_is_sent_as_it_was(script: Script, tmp_path: Path) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * i, "input_length": 10 + i, "output_length": 1 + i} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    _, document = await measure(options(server.url, trace=trace, requests=None, time_scale=0.5))
    assert sorted(len(body["prompt"]) for body in server.bodies) == [10, 11, 12, 13]
    assert [line["intended_s"] for line in document["per_request"]] == pytest.approx([0, 0.05, 0.1, 0.15])


async def test_rates_are_of_the_whole_duration(script: Script) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    load = options(
        server.url,
        rate_per_s=10.0,
        arrivals="poisson",
        exact_counts=True,
        requests=None,
        duration_s=0.5,
        warmup_s=0.1,
    )
    run, document = await measure(load)
    assert run.observations[-1].intended_s < run.began_s + 0.5
    assert document["window_s"] == pytest.approx(0.4)
    assert document["rates"]["offered_requests_per_s"] == pytest.approx(10.0)
    _, document = await measure(options(server.url))
    assert document["window_s"] == pytest.approx(12 / 40), "as many as were asked for: to the last of them"


async def test_a_host_name_is_looked_up_once(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await script(first_s=0.0, gap_s=0.0)
    loop = asyncio.get_running_loop()
    real, asked = loop.getaddrinfo, list[object]()

    async def counted(host: Any, port: Any, **more: Any) -> Any:
        asked.append(host)
        return await real(host, port, **more)

    target = await prepare(
        server.url.replace("127.0.0.1", "localhost"),
        kind=None,
        model=None,
        api_key=None,
        force_length=True,
        timeout_s=60.0,
    )
    monkeypatch.setattr(loop, "getaddrinfo", counted)
    run = await run_open_loop(target, make_sessions(options(server.url)), Limits())
    assert all(seen.ok for seen in run.observations)
    assert asked.count("localhost") == 1


async def test_servers_that_cannot_be_measured(script: Script) -> None:
    with pytest.raises(ServerUnusable, match="connect"):
        await measure(options("http://127.0.0.1:9"))
    server = await script()
    with pytest.raises(WorkloadError, match="http://"):
        await measure(options("localhost:8000"))
    with pytest.raises(WorkloadError, match="endpoint"):
        await measure(options(server.url, endpoint="responses"))
    with pytest.raises(WorkloadError, match="closed loop"):
        await measure(options(server.url, users=2, requests=None))
