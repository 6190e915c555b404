"""``antiphon bench``: load on a server, the sweep over layouts, and the page of results."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from antiphon.cluster import cli_bench_peers
from antiphon.cluster.bench_options import durations_s, limit_s, parts, positive, whole
from antiphon.protocol.errors import ConfigError

bench_app = typer.Typer(help="Measure a server or the GPUs of this machine.", no_args_is_help=True)
bench_app.command("peers")(cli_bench_peers.peers)
bench_app.command("beside")(cli_bench_peers.beside)

PRICE = 3.0
"""US dollars an hour of one GPU, where nothing else is said."""


@bench_app.command("serve")
def serve(
    url: Annotated[
        str, typer.Option(envvar="ANTIPHON_URL", help="Any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The first served one when absent.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ANTIPHON_API_KEY", help="Sent as a bearer.")] = None,
    endpoint: Annotated[
        str,
        typer.Option(help="completions (token-id prompts), chat, or auto: completions where they are taken."),
    ] = "auto",
    rate: Annotated[float, typer.Option(help="Mean sessions per second of the open loop.")] = 1.0,
    arrivals: Annotated[
        str, typer.Option(help="constant, poisson, gamma:cv=2 or mmpp:factor=4,share=0.1,burst=5.")
    ] = "poisson",
    users: Annotated[int | None, typer.Option(help="Closed loop with so many users instead.")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL trace to replay instead.")] = None,
    time_scale: Annotated[float, typer.Option(help="Trace times are multiplied by this.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Sessions in all.")] = None,
    duration: Annotated[str | None, typer.Option(help="Length of the run, such as 60s.")] = None,
    warmup: Annotated[str | None, typer.Option(help="Part left out of the figures, such as 10s.")] = None,
    exact_counts: Annotated[
        bool,
        typer.Option(help="As many Poisson arrivals as on average, in the warm-up and in what is measured."),
    ] = False,
    standing: Annotated[
        int, typer.Option(min=0, help="Requests that a steady load finds in service, sent in the warm-up.")
    ] = 0,
    input_tokens: Annotated[
        str, typer.Option(help="1000, uniform:low=..,high=.., lognormal:mean=..,sigma=.. or file:PATH.")
    ] = "1000",
    output_tokens: Annotated[str, typer.Option(help="The same for answers.")] = "200",
    shared_prefix_tokens: Annotated[int, typer.Option(help="Beginning that prompts of a group share.")] = 0,
    prefix_groups: Annotated[int, typer.Option(help="Groups with a shared beginning.")] = 1,
    turns: Annotated[int, typer.Option(help="Requests of one session.")] = 1,
    turn_tokens: Annotated[str | None, typer.Option(help="What each later turn adds.")] = None,
    think: Annotated[str | None, typer.Option(help="Pause before a later turn, such as 2s.")] = None,
    force_length: Annotated[
        bool, typer.Option(help="Send ignore_eos and min_tokens; turn off for servers that refuse them.")
    ] = True,
    extra: Annotated[str | None, typer.Option(help="JSON object of more fields for every request.")] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives for goodput: ttft=1s,itl=20ms,tpot=..,e2e=..; may be given many times."
        ),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests open at one time; waiting counts as latency.")
    ] = 4096,
    request_timeout: Annotated[str, typer.Option(help="Longest request.")] = "600s",
    drain: Annotated[str, typer.Option(help="Longest wait for answers after the last request.")] = "120s",
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON report.")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML report with plots.")] = None,
) -> None:
    """Put load on a server and report latency percentiles, rates and goodput."""
    from antiphon.benchmarks.serve.command import Options, run_command
    from antiphon.benchmarks.serve.slo import parse_duration_s

    run_command(
        Options(
            url=url,
            model=model,
            api_key=api_key,
            endpoint=endpoint,
            rate_per_s=rate,
            arrivals=arrivals,
            users=users,
            trace=trace,
            time_scale=time_scale,
            requests=requests if requests or duration or trace else 100,
            duration_s=None if duration is None else parse_duration_s(duration, "duration"),
            warmup_s=0.0 if warmup is None else parse_duration_s(warmup, "warmup"),
            exact_counts=exact_counts,
            standing=standing,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix_tokens,
            prefix_groups=prefix_groups,
            turns=turns,
            turn_tokens=turn_tokens,
            think_s=0.0 if think is None else parse_duration_s(think, "think"),
            force_length=force_length,
            extra=None if extra is None else _json_object(extra),
            max_in_flight=max_in_flight,
            request_timeout_s=parse_duration_s(request_timeout, "request-timeout"),
            drain_s=parse_duration_s(drain, "drain"),
            seed=seed,
            slo=tuple(slo or ()),
            output=output,
            html=html,
        )
    )


def _json_object(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra {text!r}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"extra {text!r}: not a JSON object")
    return document


class Device(StrEnum):
    """Where a sweep measures."""

    cuda = "cuda"
    cpu = "cpu"


@bench_app.command("sweep")
def sweep(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "gpt-oss-20b,gpt-oss-120b",
    layouts: Annotated[
        str,
        typer.Option(help="Such as 'TP1,TP2 EP2,TP1 DP2'; every one that fits the devices here when absent."),
    ] = "",
    input_tokens: Annotated[str, typer.Option(help="Prompt lengths; 1k to 128k when absent.")] = "",
    batches: Annotated[str, typer.Option(help="Of decode steps; 1 to 128 when absent.")] = "",
    contexts: Annotated[str, typer.Option(help="Of decode steps; 8192 and 32768 when absent.")] = "",
    steps: Annotated[int, typer.Option(min=2, help="Decode steps timed for each point.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts timed for each point.")] = 3,
    chunk: Annotated[int, typer.Option(min=64, help="Prompt tokens of one step.")] = 8192,
    device: Annotated[
        Device, typer.Option(help="cpu runs the same path, for tests and small models.")
    ] = Device.cuda,
    ranks: Annotated[int | None, typer.Option(min=1, help="Devices to use; all when absent.")] = None,
    at_once: Annotated[
        bool,
        typer.Option(
            help="As many models and layouts at the same time as there are devices for; replicas bring the "
            "figures of one along."
        ),
    ] = False,
    enough: Annotated[
        str | None, typer.Option(help="Time no more prompts of a point once they took so long, such as 4s.")
    ] = None,
    price: Annotated[float, typer.Option(help="US dollars an hour of one GPU.")] = PRICE,
    again: Annotated[bool, typer.Option(help="Measure what the file holds already once more.")] = False,
    limit: Annotated[
        str | None, typer.Option(help="Begin no point after so long, such as 500s; the next run goes on.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of records; the project's sweep.json when absent.")
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Folder of the page that is written afterwards; the checkout's without --output."),
    ] = None,
) -> None:
    """Measure prefill and decode for every layout that fits the devices here; resumes where it stopped."""
    from antiphon.benchmarks.records import RESULTS
    from antiphon.benchmarks.sweep.command import Sizes, run_command
    from antiphon.benchmarks.sweep.meter import Effort
    from antiphon.benchmarks.sweep.points import BATCHES, CONTEXTS, INPUT_TOKENS

    def sizes(text: str, option: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(whole(each, option) for each in parts(text)) or otherwise

    if output is None and docs is None:
        from antiphon.benchmarks.report.page import DOCS

        docs = DOCS
    run_command(
        parts(models),
        RESULTS / "sweep.json" if output is None else output,
        layouts=parts(layouts),
        gpu_hour_price=price,
        again=again,
        device=device.value,
        ranks=ranks,
        sizes=Sizes(
            sizes(input_tokens, "input-tokens", INPUT_TOKENS),
            sizes(batches, "batches", BATCHES),
            sizes(contexts, "contexts", CONTEXTS),
        ),
        effort=Effort(steps, repeats, chunk, limit_s(enough, "enough")),
        docs=docs,
        seconds=limit_s(limit),
        at_once=at_once,
    )


@bench_app.command("split")
def split(
    config: Annotated[
        Path, typer.Option(help="Deployment file of the split, such as one prefill and one decode.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder in place of the file's, such as a synthesized one.")
    ] = None,
    mixes: Annotated[
        str, typer.Option(help="Of long-in, chat and long-out, or NAME=INPUT/OUTPUT tokens; comma-separated.")
    ] = "long-in,chat,long-out",
    ttft: Annotated[str, typer.Option(help="Limit of every request's time to first token.")] = "1s",
    itl: Annotated[
        str, typer.Option(help="Limits of a request's own 99th percentile between tokens.")
    ] = "10ms,20ms,50ms",
    chunks: Annotated[
        str,
        typer.Option(help="Prompt tokens a step of a colocated engine; each limit takes the best of them."),
    ] = "512,2048,8192",
    attainment: Annotated[float, typer.Option(help="Share of requests that must keep the limits.")] = 0.9,
    rate: Annotated[
        str,
        typer.Option(
            help="First load, requests per second; expected: near what the cost model expects of each "
            "arrangement, mix and limit, with loads that begin steady."
        ),
    ] = "0.5",
    step: Annotated[float, typer.Option(help="Each load is so many times the one before.")] = 1.5,
    highest_rate: Annotated[float, typer.Option(help="No load above this.")] = 1000.0,
    refine: Annotated[
        int, typer.Option(help="Loads between the last that held and the first that did not.")
    ] = 1,
    duration: Annotated[
        str, typer.Option(help="Of one load, such as 60s; mixes may differ: 20s,long-out=40s.")
    ] = "60s",
    warmup: Annotated[str, typer.Option(help="Part of it that is left out, likewise.")] = "10s",
    drain: Annotated[str, typer.Option(help="Longest wait for answers after its last request.")] = "30s",
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL of somebody else's server on as many GPUs, measured alike; may be repeated."
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(help="Interpreter that has vLLM: replicas of it, one a GPU, are measured too."),
    ] = None,
    peer_chunks: Annotated[str, typer.Option(help="Tokens of a step of these.")] = "2048",
    only: Annotated[
        str, typer.Option(help="Measure only these arrangements: split, colocated, replicas, or a NAME.")
    ] = "",
    again: Annotated[
        bool,
        typer.Option(help="Measure what the file holds already once more, such as with other settings."),
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            help="Begin no load that would not end within so long, such as 540s; the next run goes on."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same loads.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="File of runs; the project's split.json when absent.")
    ] = None,
) -> None:
    """Compare prefill/decode split with colocated engines on the same GPUs, by real HTTP load; resumes."""
    from antiphon.benchmarks.records import RESULTS
    from antiphon.benchmarks.serve.slo import parse_duration_s
    from antiphon.benchmarks.split.command import Limits, run_command
    from antiphon.benchmarks.split.loads import load_seconds
    from antiphon.benchmarks.split.mixes import parse_mixes
    from antiphon.configs.deployment_file import load_deployment

    limits = Limits(
        parse_duration_s(ttft, "ttft") * 1e3,
        tuple(parse_duration_s(each, "itl") * 1e3 for each in parts(itl)),
        attainment,
    )
    peer = None
    if peer_python is not None:
        from antiphon.benchmarks.peers.meter import find_peer

        peer = find_peer("vllm", peer_python), [whole(each, "peer-chunks") for each in parts(peer_chunks)]
    durations, warmups = durations_s(duration, "duration"), durations_s(warmup, "warmup")
    deployment = load_deployment(config)
    if model is not None:  # under the same name, since the shape is the same
        name = deployment.model.name
        deployment = load_deployment(config, {"model.path": model, "model.served_name": name})
    run_command(
        deployment,
        parse_mixes(mixes),
        limits,
        chunks=[whole(each, "chunks") for each in parts(chunks)],
        servers=[_named_url(each) for each in server or ()],
        peer=peer,
        only=parts(only),
        first_rate_per_s=None if rate == "expected" else positive(rate, "rate"),
        step=step,
        highest_rate_per_s=highest_rate,
        refine=refine,
        duration_s=durations.pop("", 60.0),
        warmup_s=warmups.pop("", 10.0),
        seconds=load_seconds(durations, warmups),
        drain_s=parse_duration_s(drain, "drain"),
        output=RESULTS / "split.json" if output is None else output,
        again=again,
        limit_s=limit_s(limit),
        seed=seed,
    )


def _named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"server {text!r}: expected NAME=URL")
    return name, url


@bench_app.command("report")
def report(
    docs: Annotated[
        Path | None, typer.Option(help="Folder of the page; the checkout's docs when absent.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of figures; the project's own when absent.")
    ] = None,
    price: Annotated[float, typer.Option(help="US dollars an hour of one GPU.")] = PRICE,
) -> None:
    """Write benchmarks.md and its plots from the raw figures."""
    from antiphon.benchmarks.records import RESULTS
    from antiphon.benchmarks.report.page import DOCS, write

    folder = DOCS if docs is None else docs
    for path in write(folder, RESULTS if results is None else results, price):
        print(path)
