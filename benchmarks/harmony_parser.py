"""What Harmony costs the router: parsing per output token, rendering and loading.

Parsing feeds a 12,000-token answer of reasoning, content and a tool call to the parser in steps of 1, 4 and
64 tokens; the cost is wall time of one thread per token, the median of several rounds. Beside it stands
openai-harmony's own streaming parser, read as a server must read it per token (delta, channel, recipient).
Bound for ours: 5 us per token at one token a step.

    python -m antiphon.benchmarks.harmony_parser --out benchmarks/results/harmony_parser.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from openai_harmony import Role, StreamableParser, load_harmony_encoding

from antiphon.protocol.messages import FinishReason
from antiphon.router.conversation import ChatMessage, Conversation, MessageRole
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.parser import HarmonyParser
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary, load_vocabulary, ranks_path

BOUND_US = 5.0
STEPS = (1, 4, 64)
ROUNDS = 7
PROSE = "The tide turns twice a day, élan vital and 潮汐 notwithstanding; 12,345 boats know it. "


def answer(vocabulary: Vocabulary, tokens: int = 12_000) -> list[int]:
    """A well-formed answer of about ``tokens`` tokens."""
    prose = PROSE * (tokens // 2 // len(vocabulary.encode(PROSE)))
    text = (
        f"<|channel|>analysis<|message|>{prose}<|end|><|start|>assistant<|channel|>commentary<|message|>{prose}"
        '<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    return vocabulary.encode_marked(text)


def parse(vocabulary: Vocabulary, token_ids: list[int], step: int) -> None:
    """Parse an answer, ``step`` tokens at a time."""
    parser = HarmonyParser(vocabulary.pieces, ToolPolicy(frozenset({"f"})))
    for start in range(0, len(token_ids), step):
        parser.feed(token_ids[start : start + step])
    outcome = parser.finish(FinishReason.STOP)
    if outcome.repairs or outcome.tool_calls != 1:
        raise RuntimeError(f"the benchmark's answer was not understood: {outcome}")


def parse_with_library(token_ids: list[int]) -> None:
    """Parse an answer with openai-harmony, reading after each token what a server needs."""
    os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(ranks_path().parent))
    parser = StreamableParser(load_harmony_encoding("HarmonyGptOss"), Role.ASSISTANT)
    for token in token_ids:
        parser.process(token)
        parser.last_content_delta, parser.current_channel, parser.current_recipient  # noqa: B018


def seconds(run: Callable[[], object]) -> float:
    """Median wall time of ``run``, after one run that is not counted."""
    run()
    samples = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def measure() -> dict[str, object]:
    """All figures, as the record that is kept."""
    load_s = seconds(load_vocabulary.__wrapped__)
    vocabulary = load_vocabulary()
    token_ids = answer(vocabulary)
    formatter = HarmonyFormatter(vocabulary, current_date=lambda: "2025-06-28")
    prompt = Conversation(messages=(ChatMessage(MessageRole.USER, PROSE * 2000),))
    prompt_tokens = len(formatter.render(prompt).token_ids)
    parsing = {}
    for step in STEPS:
        parse_s = seconds(partial(parse, vocabulary, token_ids, step))
        parsing[f"{step}_token_steps"] = round(parse_s / len(token_ids) * 1e6, 3)
    library_load_s = seconds(lambda: parse_with_library([]))
    library_s = seconds(lambda: parse_with_library(token_ids)) - library_load_s
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "shape": {"answer_tokens": len(token_ids), "prompt_tokens": prompt_tokens},
        "results": {
            "parse_us_per_token": parsing,
            "openai_harmony_parse_us_per_token": round(library_s / len(token_ids) * 1e6, 3),
            "render_us_per_token": round(seconds(lambda: formatter.render(prompt)) / prompt_tokens * 1e6, 3),
            "load_s": round(load_s, 3),
        },
    }


def main() -> None:
    """Print the figures; keep them with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the raw figures")
    options = parser.parse_args()
    record = measure()
    print(json.dumps(record, indent=2))
    print(f"bound: {BOUND_US} us per token at one token a step")
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
