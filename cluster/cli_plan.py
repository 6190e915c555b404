"""``antiphon plan``: what to run for a latency target, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    model: Annotated[str, typer.Option(help="gpt-oss-20b or gpt-oss-120b.")] = "gpt-oss-120b",
    ttft: Annotated[str, typer.Option(help="Time to first token at the quantile, such as 500ms.")] = "1s",
    itl: Annotated[str, typer.Option(help="Time between tokens, such as 8ms.")] = "20ms",
    isl: Annotated[int, typer.Option(min=1, help="Mean prompt length in tokens.")] = 4000,
    osl: Annotated[int, typer.Option(min=1, help="Mean answer length in tokens.")] = 500,
    rps: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    price: Annotated[float, typer.Option(help="US dollars an hour of one GPU.")] = 3.0,
    quantile: Annotated[float, typer.Option(help="Share of requests that shall meet the targets.")] = 0.95,
    sigma: Annotated[
        float, typer.Option(help="Spread of the lengths (of their logarithm); 0: all alike.")
    ] = 0.7,
    link: Annotated[float, typer.Option(help="GB/s between a prefill and a decode GPU.")] = 50.0,
    simulate: Annotated[bool, typer.Option(help="Check the best plan by simulation.")] = True,
    simulated_time: Annotated[str, typer.Option(help="Load that is simulated.")] = "300s",
    results: Annotated[
        Path | None, typer.Option(help="Folder of measured figures; the project's own when absent.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Everything as JSON.")] = None,
) -> None:
    """Layouts, numbers of workers, GPUs and prices for a latency target; all predicted, and marked so."""
    from antiphon.benchmarks import records
    from antiphon.benchmarks.plan.command import run_command
    from antiphon.benchmarks.plan.planner import Targets
    from antiphon.benchmarks.serve.slo import parse_duration_s

    targets = Targets(
        ttft_s=parse_duration_s(ttft, "ttft"),
        itl_s=parse_duration_s(itl, "itl"),
        input_tokens=isl,
        output_tokens=osl,
        requests_per_s=rps,
        quantile=quantile,
        link_bytes_per_s=link * 1e9,
        gpu_hour_price=price,
        length_sigma=sigma,
    )
    run_command(
        model,
        targets,
        results=records.RESULTS if results is None else results,
        duration_s=parse_duration_s(simulated_time, "simulated-time"),
        simulate=simulate,
        output=output,
    )
