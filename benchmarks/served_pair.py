"""The split as people use it: ``antiphon serve`` with Ray, NIXL and HTTP, asked by OpenAI's SDK, streaming.

Greedy answers with log-probabilities, one request at a time, from the deployment of a file and then from
engines that compute prompts themselves on the same devices. Text, reasoning and every log-probability must be
equal to the last bit: the kernels are the same and so is the shape of every batch. With ``--split-only``
nothing is compared, which suits random weights.

    python -m antiphon.benchmarks.served_pair --config configs/two-gpus-20b.yaml --model gpt-oss-tiny
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.benchmarks.records import Layout, Record, append_records, checkout_commit, now
from antiphon.benchmarks.split.arrangements import SPLIT, Arrangement, colocated_of, split_of
from antiphon.benchmarks.split.host import start_server
from antiphon.benchmarks.split.run import device_name
from antiphon.cluster.cli_serve import read_config
from antiphon.cluster.layout_check import layout_of
from antiphon.configs.schema import DeploymentConfig

QUESTIONS = (
    "What is the capital of France?",
    "Add 17 and 25.",
    "Spell the word antiphon.",
    "Name three rivers, then say which of them is the longest, and why you think so.",
)
TOKENS = 48
SMALL_POOL = {"full_pages": 512, "sliding_pages": 512}


@dataclass(slots=True)
class Answer:
    """What one streamed answer was."""

    first_s: float = 0.0
    total_s: float = 0.0
    events: int = 0
    text: str = ""
    reasoning: str = ""
    logprobs: list[float] = field(default_factory=list)

    @property
    def said(self) -> tuple[str, str, list[float]]:
        """What must be equal."""
        return self.text, self.reasoning, self.logprobs


def deployment(file: Path, model: str | None) -> DeploymentConfig:
    """The file's deployment; of the demo model with pools of its size, on the road that its shape takes."""
    config = read_config(model, file, 0)
    if model != "gpt-oss-tiny":
        return config
    document = config.model_dump()
    for role in ("prefill", "decode"):
        pool = document[role]
        pool["kv_cache"] |= SMALL_POOL
        pool["chunk_tokens"] = min(pool["chunk_tokens"], 2048)
        pool["fp8_experts"] = type(config.prefill).model_fields["fp8_experts"].default
    document["model"]["dtype"] = "bfloat16" if config.decode.device == "cuda" else "float32"
    return DeploymentConfig.model_validate(document)


async def ask(client: Any, model: str, question: str) -> Answer:
    """One streamed answer."""
    answer, begin = Answer(), time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=TOKENS,
        temperature=0.0,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            reasoning = getattr(choice.delta, "reasoning", None) or ""
            if (choice.delta.content or reasoning) and not answer.first_s:
                answer.first_s = time.perf_counter() - begin
            answer.text += choice.delta.content or ""
            answer.reasoning += reasoning
            answer.events += 1
            if choice.logprobs is not None and choice.logprobs.content:
                answer.logprobs += [token.logprob for token in choice.logprobs.content]
    answer.total_s = time.perf_counter() - begin
    return answer


async def answers_of(arrangement: Arrangement) -> tuple[float, list[Answer]]:
    """Seconds until it was ready, and its answers."""
    from openai import AsyncOpenAI

    begin = time.perf_counter()
    async with start_server(arrangement) as url:
        ready_s = time.perf_counter() - begin
        # No file of this machine's user, and no proxy, may have a say in where requests go.
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0)
        model = (await client.models.list()).data[0].id
        long = " ".join(f"{number} is a number." for number in range(300))
        found = [await ask(client, model, question) for question in (*QUESTIONS, long)]
        await client.close()
    return ready_s, found


def main() -> int:
    """Serve, ask, compare; 1 when answers differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", help="served instead of the file's")
    parser.add_argument("--split-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = deployment(options.config, options.model)
    chosen = [split_of(config)]
    if not options.split_only:
        chosen.append(colocated_of(config, config.prefill.chunk_tokens))
    device = device_name(config.decode.device == "cuda")
    found: dict[str, list[Answer]] = {}
    for arrangement in chosen:
        ready_s, found[arrangement.name] = asyncio.run(answers_of(arrangement))
        first_ms = statistics.median(answer.first_s for answer in found[arrangement.name]) * 1e3
        events = sum(answer.events for answer in found[arrangement.name])
        extra: dict[str, object] = {"shape": arrangement.label, "ready_s": ready_s, "events": events}
        if arrangement.name == SPLIT:
            extra["prefill"] = f"{config.prefill.replicas} x {layout_of(config.prefill).name}"
        said = f"ready in {ready_s:.1f} s, first text after {first_ms:.1f} ms, {events} events"
        print(f"{arrangement.label}: {said}", flush=True)
        record = Record(
            *("served", config.model.name, Layout.parse(layout_of(config.decode).name).name, device),
            *(checkout_commit(), now(), first_ms, "ms"),
            kernel=arrangement.name,
            extra=extra,
        )
        if options.out:
            append_records(options.out, [record])
    if options.split_only:
        return 0
    split, colocated = found.values()
    differing = [index for index, (a, b) in enumerate(zip(split, colocated, strict=True)) if a.said != b.said]
    if not any(answer.logprobs for answer in split):
        print("every answer came without log-probabilities: nothing was compared")
        return 1
    print(f"{len(split) - len(differing)} of {len(split)} answers are equal to the last bit")
    for index in differing:
        print(f"split:     {split[index].said}\ncolocated: {colocated[index].said}")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
