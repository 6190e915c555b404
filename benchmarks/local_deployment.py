"""What a deployment on this machine costs and gives: time to ready, TTFT, tokens/s, memory.

    python -m antiphon.benchmarks.local_deployment [--config FILE] [--output FILE]

Prints the figures and writes them with the commit, the machine and the date. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path

import httpx
import psutil

from antiphon.cluster.cli_serve import DEFAULT_CONFIG, read_config
from antiphon.cluster.deployment import deploy
from antiphon.cluster.resolution import resolve_deployment

PROMPT_TOKENS = 200
TEMPLATE_TOKENS = 67
"""Of the system message and the markers around one user message."""
STREAMS = 8
STREAM_TOKENS = 128
TTFT_REPEATS = 9

Figures = dict[str, float | list[float]]


async def measure(config_file: Path) -> Figures:
    """Start the deployment, measure it, stop it."""
    config = read_config(None, config_file, 0)
    began = time.monotonic()
    async with deploy(resolve_deployment(config)) as deployment:
        await deployment.wait_ready()
        ready_s = time.monotonic() - began
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(
            base_url=deployment.urls[0], timeout=120.0, limits=limits, trust_env=False
        ) as client:
            await stream(client, config.model.name, "warm up", 4)
            ttfts = []
            for repeat in range(TTFT_REPEATS):
                ttft_s, _, _ = await stream(client, config.model.name, prompt(repeat), 2)
                ttfts.append(ttft_s)
            _, prompt_tokens, _ = await stream(client, config.model.name, prompt(TTFT_REPEATS), 1)
            began = time.monotonic()
            answers = await asyncio.gather(
                *(stream(client, config.model.name, prompt(100 + i), STREAM_TOKENS) for i in range(STREAMS))
            )
            streams_s = time.monotonic() - began
        return {
            "ready_s": ready_s,
            "prompt_tokens": float(prompt_tokens),
            "ttft_s": ttfts,
            "ttft_median_s": statistics.median(ttfts),
            "streams": float(STREAMS),
            "stream_tokens": float(sum(tokens for _, _, tokens in answers)),
            "streams_s": streams_s,
            "tokens_per_s": sum(tokens for _, _, tokens in answers) / streams_s,
            "rss_bytes": float(deployment_rss_bytes()),
        }


async def stream(client: httpx.AsyncClient, model: str, text: str, tokens: int) -> tuple[float, int, int]:
    """(seconds to the first token, prompt tokens, output tokens) of one streamed greedy answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_s, usage = time.monotonic(), None, None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            usage = chunk.get("usage") or usage
            if first_s is None and chunk["choices"] and _carries_output(chunk["choices"][0]):
                first_s = time.monotonic() - began
    if first_s is None or usage is None:
        raise RuntimeError("the stream ended without a token or without usage")
    return first_s, usage["prompt_tokens"], usage["completion_tokens"]


def _carries_output(choice: dict[str, object]) -> bool:
    """A first chunk has only the role; the end alone counts for an answer that shows no text."""
    delta = choice.get("delta")
    shown = isinstance(delta, dict) and any(delta.get(key) for key in ("content", "reasoning", "tool_calls"))
    return shown or choice.get("finish_reason") is not None


def prompt(seed: int) -> str:
    """Words that render to ``PROMPT_TOKENS`` tokens and share no prefix page with another seed's."""
    rng = random.Random(seed)
    words = ["river", "stone", "cloud", "paper", "green", "seven", "north", "light", "metal", "bread"]
    return " ".join(rng.choice(words) for _ in range(PROMPT_TOKENS - TEMPLATE_TOKENS))


def deployment_rss_bytes() -> int:
    """Resident memory of this process (the supervisor) and all that it started, Ray included."""
    mine = psutil.Process()
    return sum(p.memory_info().rss for p in (mine, *mine.children(recursive=True)) if p.is_running())


def machine() -> dict[str, object]:
    """Where the figures come from."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    dirty = subprocess.run(
        ["git", "status", "--porcelain"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    model_names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model_names[0].partition(":")[2].strip() if model_names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "results" / "local-cpu.json"
    )
    arguments = parser.parse_args()
    where = machine()
    figures = asyncio.run(measure(arguments.config))
    print(f"time to ready              {figures['ready_s']:8.1f} s")
    print(f"TTFT of {figures['prompt_tokens']:.0f} prompt tokens  {figures['ttft_median_s']:8.3f} s (median)")
    print(f"{STREAMS} streams                  {figures['tokens_per_s']:8.1f} tokens/s together")
    print(f"memory of the deployment   {float(str(figures['rss_bytes'])) / 1e9:8.2f} GB")
    result = {"machine": where, "config": arguments.config.name, "figures": figures}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
