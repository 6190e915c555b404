"""What a grammar costs a decode step: its masks, and following the tokens that were chosen.

Every row of a step writes the same JSON document by a schema, a token a step, each beginning at another place
of it, so that the rows of a step differ as those of strangers do. Masks are made for all rows together, as
the engine does it; on a GPU that happens while the step's forward pass computes. Median over the steps, of
wall time and of processor time over all threads, which is what counts on a machine that does other work too.

    python -m antiphon.benchmarks.grammar_masks --out benchmarks/results/grammar_masks.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import JsonValue

from antiphon.cluster.grammar_vocabulary import harmony_grammars
from antiphon.engine.grammar import OutputGrammar, step_masks
from antiphon.engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from antiphon.engine.token_masks import forbid
from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ResponseFormat,
    ResponseFormatKind,
)
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.markers import VOCABULARY_SIZE

ROWS = (1, 8, 32, 128)
PERSON: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["friend", "colleague", "family"]}},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "notes"],
    "additionalProperties": False,
}
SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON}},
    "required": ["people"],
}
PEOPLE = [
    {
        "name": "José Ångström",
        "age": 41,
        "email": "jose@example.org",
        "tags": ["friend"],
        "notes": "潮汐",
    },
    {
        "name": "Ada",
        "age": 36,
        "email": "ada@example.org",
        "tags": ["family", "friend"],
        "notes": '"no"',
    },
] * 3


def ready(compiled: CompiledGrammar, said: list[int]) -> OutputGrammar:
    """The grammar of an output that has come so far."""
    done: Future[CompiledGrammar] = Future()
    done.set_result(compiled)
    return OutputGrammar(done, said)


def step_times(
    compiled: CompiledGrammar, tokens: list[int], header: int, rows: int
) -> list[tuple[float, float]]:
    """(wall, processor) seconds of each step; the rows begin behind the header and further on."""
    body = len(tokens) - header - 1
    places = [header + row * body // rows for row in range(rows)]
    grammars = [ready(compiled, tokens[:place]) for place in places]
    for grammar in grammars:
        grammar.state  # noqa: B018  (what came before is followed now, outside of the times)
    times = []
    for _ in range(body // 2):
        started = time.perf_counter(), time.process_time()
        masks = step_masks(list(enumerate(grammars)))
        for row, grammar in enumerate(grammars):
            grammar.state.advance(tokens[places[row]])
            places[row] += 1
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
        if masks is None or masks.errors:
            raise RuntimeError(f"the benchmark's document does not fit: {masks}")
        for row, place in enumerate(places):
            if place >= len(tokens) - 1:
                places[row], grammars[row] = header, ready(compiled, tokens[:header])
                grammars[row].state  # noqa: B018
    return times


def compile_ms(compiler: GrammarCompiler, conversation: Conversation, formatter: HarmonyFormatter) -> float:
    """Milliseconds to compile a grammar that was never seen."""
    grammar = formatter.render(conversation).grammar
    if grammar is None:
        raise RuntimeError("the benchmark's conversation demands nothing")
    started = time.perf_counter()
    compiler.compile(grammar).result()
    return (time.perf_counter() - started) * 1e3


def measure() -> dict[str, object]:
    """All figures, as the record that is kept."""
    started = time.perf_counter()
    compiler = harmony_grammars(VOCABULARY_SIZE)
    if compiler is None:
        raise RuntimeError("no compiler for the Harmony vocabulary")
    load_s = time.perf_counter() - started
    formatter = HarmonyFormatter(current_date=lambda: "2025-06-28")
    form = ResponseFormat(ResponseFormatKind.JSON_SCHEMA, "people", None, SCHEMA)
    conversation = Conversation((ChatMessage(MessageRole.USER, "Who?"),), response_format=form)
    first_ms = compile_ms(compiler, conversation, formatter)
    grammar = formatter.render(conversation).grammar
    if grammar is None:
        raise RuntimeError("the benchmark's conversation demands nothing")
    compiled = compiler.compile(grammar).result()
    header = formatter.vocabulary.encode_marked("<|channel|>final<|message|>")
    document = json.dumps({"people": PEOPLE}, ensure_ascii=False)
    tokens = [*header, *formatter.vocabulary.encode_marked(f"{document}<|return|>")]
    steps: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        step_times(compiled, tokens, len(header), rows)
        times = step_times(compiled, tokens, len(header), rows)
        steps[str(rows)] = {
            "wall_us": round(statistics.median(wall for wall, _ in times) * 1e6, 1),
            "processor_us": round(statistics.median(used for _, used in times) * 1e6, 1),
        }
    logits, one = torch.zeros(1, VOCABULARY_SIZE), torch.zeros(1, dtype=torch.int64)
    bits = torch.zeros(1, compiler.words, dtype=torch.int32)
    applied = []
    for _ in range(50):
        started = time.perf_counter()
        forbid(logits, one, bits)
        applied.append(time.perf_counter() - started)
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average": round(os.getloadavg()[0], 1),
        },
        "shape": {"vocabulary": VOCABULARY_SIZE, "document_tokens": len(tokens) - len(header) - 1},
        "results": {
            "load_s": round(load_s, 3),
            "compile_ms": round(first_ms, 2),
            "step_by_rows": steps,
            "apply_one_row_on_cpu_us": round(statistics.median(applied) * 1e6, 1),
        },
    }


def main() -> None:
    """Print the figures; keep them with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the raw figures")
    options = parser.parse_args()
    record = measure()
    print(json.dumps(record, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
