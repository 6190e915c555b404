"""What antiphon top makes of two readings of every process."""

from __future__ import annotations

import io
import math

import httpx
import pytest
from rich.console import Console

from antiphon.cluster import cli_top
from antiphon.cluster.cli_top import MetricsClient, MetricsUnreachable, seconds, view
from antiphon.cluster.top_figures import Interval, Reading, quantile

SUPERVISOR = """\
antiphon_build_info{model_name="m",role="supervisor",version="1"} 1
antiphon_member_up{role="prefill",worker="prefill-0"} 1
antiphon_member_up{role="decode",worker="decode-0"} 1
antiphon_member_up{role="decode",worker="decode-1"} 0
antiphon_member_up{role="router",worker="router-0"} 1
antiphon_member_ready{role="prefill",worker="prefill-0"} 1
antiphon_member_ready{role="decode",worker="decode-0"} 0
antiphon_member_restarts_total{role="decode",worker="decode-1"} 4
"""


def worker(role: str, tokens: int, steps: int, sequences: int) -> str:
    sampled = (
        f"antiphon_generation_tokens_total {tokens}"
        if role == "decode"
        else f'antiphon_prompt_tokens_by_source_total{{source="local_compute"}} {tokens}\n'
        'antiphon_prompt_tokens_by_source_total{source="local_cache_hit"} 99999'
    )
    return f"""\
antiphon_num_requests_running 3
antiphon_num_requests_waiting 1
antiphon_num_requests_awaiting_kv 2
antiphon_kv_cache_usage_perc 0.5
antiphon_kv_blocks{{group="full",state="quarantined"}} 5
antiphon_worker_draining 0
{sampled}
antiphon_batch_size_count {steps}
antiphon_batch_size_sum {sequences}
antiphon_kv_transfer_bytes_sum {tokens * 1000}
"""


def router(first_tokens: int, fast: int) -> str:
    name = "antiphon_time_to_first_token_seconds_bucket"
    return f"""\
antiphon_requests_in_flight 7
antiphon_requests_queued 2
antiphon_output_tokens_total {first_tokens * 10}
{name}{{le="0.1"}} {fast}
{name}{{le="0.5"}} {first_tokens}
{name}{{le="+Inf"}} {first_tokens}
"""


def shown(before: dict[str, str], after: dict[str, str]) -> str:
    old = {name: Reading.parse(10.0, text) for name, text in before.items()}
    new = {name: Reading.parse(12.0, text) for name, text in after.items()}
    console = Console(width=120, file=io.StringIO())
    console.print(view("http://x", Reading.parse(12.0, SUPERVISOR), new, old))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_look_shows_pools_service_and_transfers() -> None:
    text = shown(
        {"prefill-0": worker("prefill", 0, 0, 0), "decode-0": worker("decode", 100, 10, 20)}
        | {"router-0": router(100, 100)},
        {"prefill-0": worker("prefill", 4000, 0, 0), "decode-0": worker("decode", 500, 20, 60)}
        | {"router-0": router(120, 110)},
    )
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ ") and "code-" in line}
    assert "up" in lines["decode-0"]
    assert [word for word in lines["decode-0"].split() if word != "│"][1:4] == ["up", "3", "3"]
    assert "50%" in lines["decode-0"]
    assert " 200 " in lines["decode-0"]  # tokens per second
    assert " 4.0 " in lines["decode-0"]  # 40 sequences in 10 steps
    assert "down" in lines["decode-1"]
    assert lines["decode-1"].rstrip(" │").endswith("4")
    (prefill,) = (line for line in text.splitlines() if "prefill-0" in line)
    assert " 2000 " in prefill  # cached tokens are not computed
    assert "in flight 7" in text
    assert "output 100 tokens/s" in text
    assert "TTFT p50 ≤ 100 ms" in text
    assert "p90 ≤ 500 ms" in text
    assert "2.2 MB/s" in text


def test_a_worker_that_was_restarted_counts_from_zero() -> None:
    before, after = (Reading.parse(at, f"antiphon_x_total {v}") for at, v in ((0.0, 500), (2.0, 30)))
    assert Interval(before, after).rate("x_total") == 15


def test_quantiles_of_what_is_new() -> None:
    def reading(at: float, counts: tuple[int, int, int]) -> Reading:
        bounds = zip(("1.0", "2.0", "+Inf"), counts, strict=True)
        return Reading.parse(at, "".join(f'antiphon_h_bucket{{le="{le}"}} {n}\n' for le, n in bounds))

    interval = Interval(reading(0, (100, 100, 100)), reading(1, (100, 109, 110)))
    assert quantile(0.5, [interval], "h") == 2.0
    assert quantile(0.99, [interval], "h") == math.inf
    assert quantile(0.5, [Interval(interval.after, interval.after)], "h") is None
    assert (seconds(None), seconds(math.inf), seconds(0.25), seconds(2.5)) == ("-", "∞", "250 ms", "2.5 s")


def test_a_page_of_something_else_is_one_clear_error() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="<html>" if request.url.path == "/metrics" else "[]")

    for transport in (httpx.MockTransport(answer), httpx.MockTransport(lambda _: httpx.Response(404))):
        client = MetricsClient("http://127.0.0.1:1/", transport)
        with pytest.raises(MetricsUnreachable, match="no metrics of a supervisor"):
            client.read()
        client.close()


def test_a_process_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 2:
            raise httpx.ConnectError("refused")
        if request.url.path == "/targets":
            groups = [{"targets": [f"h:{port}"], "labels": {"process": f"p{port}"}} for port in (2, 3)]
            return httpx.Response(200, json=groups)
        return httpx.Response(200, text=SUPERVISOR if request.url.port is None else "antiphon_x 1\n")

    client = MetricsClient("http://h", httpx.MockTransport(answer))
    supervisor, readings = client.read()
    client.close()
    assert supervisor.total("member_up") == 3
    assert list(readings) == ["p3"]
    assert cli_top.rate_of_bytes(1.5e9) == "1.5 GB/s"
