"""Every declared metric moves, and carries the model's name."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.protocol.messages import RequestRefused
from antiphon.router.byte_format import ARGUMENTS, CONTENT, REASONING, TOOL, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.metrics import TTFT_STAGES, VLLM_NAMES
from antiphon.telemetry import buckets
from antiphon.telemetry.loop_metrics import LoopCounter, LoopHistogram


def values(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny", sample
            # The first bucket is often 0; sums and counts are what must move.
            if not sample.name.endswith("_bucket"):
                found[family.name] = max(found.get(family.name, 0.0), sample.value)
        found.setdefault(family.name, 0.0)
    return found


async def test_every_declared_metric_moves(deploy, until):
    workers = ScriptedGateway(
        lambda _: byte_answer((REASONING, "r"), (TOOL, "unknown"), (ARGUMENTS, "{}"), (CONTENT, "x" * 30)),
        decode=2,
    )
    workers.step_s = 0.002
    workers.cached_tokens = 5
    deployment = await deploy(workers, max_in_flight_requests=2, max_queued_requests=1, max_attempts=3)
    seen: dict[str, float] = {}

    async def look() -> None:
        text = (await deployment.http.get("/metrics")).text
        for name, value in values(text).items():
            seen[name] = max(seen.get(name, 0.0), value)

    await deployment.chat(tools=[{"type": "web_search"}])
    workers.report(running=3, queued_prefill_tokens=40)
    await look()
    # Failures in a row open a circuit, and use up the attempts.
    workers.workers["p0"].fail = ["transfer"] * 3
    assert (await deployment.chat()).status_code == 500
    await look()
    # Queued, refused at the door, disconnected.
    workers.step_s = 0.05
    requests = [asyncio.create_task(deployment.chat()) for _ in range(3)]
    await until(lambda: deployment.server.open_requests == 3)
    assert (await deployment.chat()).status_code == 429
    await look()
    for request in requests:
        request.cancel()
    await until(lambda: not deployment.server.open_requests)
    workers.workers["d0"].refuse = [RequestRefused("", 0, "larger", False)]
    workers.workers["d1"].refuse = [RequestRefused("", 0, "larger", False)]
    assert (await deployment.chat()).status_code == 400
    deployment.server._context.metrics.slow_clients.inc()  # its own test cuts a client off
    await look()
    still = sorted(name for name, value in seen.items() if not value)
    assert still == []


async def test_parts_of_the_time_to_first_token_are_told_apart(deploy):
    deployment = await deploy()
    deployment.workers.step_s = 0.02
    response = await deployment.chat()
    measured = {"prefill_queue": 0.001, "prefill": 0.002, "first_decode": 0.004}
    whole = 0.0
    for stage in (*TTFT_STAGES, "detokenize"):
        assert await deployment.metric("stage_duration_seconds_count", stage=stage) == 1
        seconds = await deployment.metric("stage_duration_seconds_sum", stage=stage)
        assert seconds == measured.get(stage, seconds) >= 0
        whole += seconds if stage in TTFT_STAGES else 0
    first_token_s = await deployment.metric("time_to_first_token_seconds_sum")
    assert whole == pytest.approx(first_token_s, abs=1e-6)
    shown = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(shown) == [*TTFT_STAGES, "detokenize", "total"]
    parts_ms = sum(float(shown[stage]) for stage in TTFT_STAGES)
    assert parts_ms == pytest.approx(first_token_s * 1000, abs=0.01)
    assert parts_ms < float(shown["total"])


async def test_a_stream_tells_its_parts_where_asked_to(deploy):
    deployment = await deploy()
    options = {"include_usage": True, "include_timing": True}
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        body = {"model": "tiny", "stream": True, **prompt}
        plain = await deployment.http.post(path, json={**body, "stream_options": {"include_usage": True}})
        assert "timing" not in plain.text
        timed = await deployment.http.post(path, json={**body, "stream_options": options})
        usage = json.loads(timed.text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
        assert set(usage["timing"]) == {f"{s}_seconds" for s in (*TTFT_STAGES, "detokenize", "total")}
        refused = await deployment.http.post(path, json={**body, "stream_options": {"include_timing": True}})
        assert refused.json()["error"]["param"] == "stream_options.include_timing"


async def test_tokens_and_latencies_are_counted_once_per_choice(deploy):
    deployment = await deploy()
    await deployment.chat(n=2)
    tokens = len("hello") + 2
    prompt = len(b"user: hi\nassistant: ")
    assert await deployment.metric("output_tokens_total") == 2 * tokens
    assert await deployment.metric("prompt_tokens_total") == 2 * prompt
    assert await deployment.metric("time_to_first_token_seconds_count") == 2
    assert await deployment.metric("inter_token_latency_seconds_count") == 2 * (tokens - 1)
    assert await deployment.metric("e2e_request_latency_seconds_count") == 2
    assert await deployment.metric("request_success_total", finished_reason="stop") == 2
    assert await deployment.metric("requests_total", endpoint="/v1/chat/completions", status_code="200") == 1


async def test_unknown_urls_share_one_label(deploy):
    deployment = await deploy()
    for i in range(5):
        await deployment.http.get(f"/nothing/{i}")
    assert await deployment.metric("requests_total", endpoint="unknown", status_code="404") == 5


def test_metrics_of_the_loop_read_as_those_of_the_library():
    values = [0.0005, 0.0006, 0.001, 0.03, 7.0, 5.0]
    expositions = []
    for own in (True, False):
        registry = CollectorRegistry()
        if own:
            histogram = LoopHistogram("h", "H.", buckets.ITL_S, registry)
            counter = LoopCounter("c", "C.", registry)
        else:
            histogram = Histogram("h", "H.", buckets=buckets.ITL_S, registry=registry)
            counter = Counter("c", "C.", registry=registry)
        for value in values:
            histogram.observe(value)
            counter.inc(3)
        text = generate_latest(registry).decode()
        expositions.append([line for line in text.splitlines() if "_created" not in line])
    assert sorted(expositions[0]) == sorted(expositions[1])


async def test_names_of_vllm_where_asked_for(deploy):
    assert "vllm:" not in (await (await deploy()).http.get("/metrics")).text
    deployment = await deploy(metrics={"compat": "vllm"})
    deployment.workers.cached_tokens = 5
    assert (await deployment.chat()).status_code == 200
    text = (await deployment.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for ours, theirs in VLLM_NAMES.items():
        source = families[f"antiphon_{ours}"]
        for name in theirs:
            alias = families[f"vllm:{name}"]
            assert alias.type == source.type
            assert [(s.labels, s.value) for s in alias.samples] == [
                (s.labels, s.value) for s in source.samples
            ]
    hits = next(s for s in families["vllm:prompt_tokens_cached"].samples)
    assert (hits.name, hits.value) == ("vllm:prompt_tokens_cached_total", 5)
    assert hits.labels == {"model_name": "tiny"}
    first_token = families["vllm:time_to_first_token_seconds"].samples
    assert {s.name.removeprefix("vllm:time_to_first_token_seconds") for s in first_token} == {
        "_bucket",
        "_count",
        "_sum",
    }
