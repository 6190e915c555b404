"""Scores the trainable model in this process on held-out questions, and prints the table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from antiphon.demo.dataset import held_out_examples
from antiphon.demo.evaluate import EFFORT_SKILLS, effort_score, evaluate, render_table, table
from antiphon.demo.generate import generate
from antiphon.demo.harmony import encoding, render_prompt
from antiphon.demo.network import TinyGptOss
from antiphon.demo.packed import load_weights, read_packed
from antiphon.demo.questions import Question, prompt_parts, question_of
from antiphon.demo.vocabulary import VOCABULARY_FILE, load_vocabulary
from antiphon.protocol.errors import CheckpointError


def prompt_of(question: Question) -> list[int]:
    """Token ids that the model continues."""
    turns, tools, instructions = prompt_parts(question)
    return render_prompt(turns, tools, question.effort, instructions, question.date)


def score_model(
    model: TinyGptOss,
    per_skill: int,
    answers: Path | None = None,
    *,
    vocabulary_file: Path = VOCABULARY_FILE,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    batch: int = 512,
) -> dict[str, tuple[int, int]]:
    """(right, total) per skill on ``per_skill`` held-out questions each; wrong answers go to ``answers``."""

    vocabulary = load_vocabulary(vocabulary_file)

    def ask(questions: Sequence[Question]) -> list[list[int]]:
        return generate(model, vocabulary, [prompt_of(q) for q in questions], dtype=dtype, batch=batch)

    questions = [
        question_of(example)
        for example in held_out_examples(seed, per_skill, vocabulary_file=vocabulary_file)
    ]
    raw: dict[int, list[int]] = {}

    def keep(asked: Sequence[Question]) -> list[list[int]]:
        outputs = ask(asked)
        raw.update(enumerate(outputs))
        return outputs

    verdicts = evaluate(questions, keep)
    scores = table(verdicts)
    plain = [q for q in questions if q.skill in EFFORT_SKILLS]
    scores["effort"] = effort_score(plain, ask)
    if answers is not None:
        with answers.open("w", encoding="utf-8") as file:
            for i, verdict in enumerate(verdicts):
                if not verdict.right:
                    line = verdict.question.to_json() | {"answer": encoding().decode(raw[i])}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    tqdm.write(render_table(scores))
    return {name: (score.right, score.total) for name, score in scores.items()}


def main() -> None:
    """``python -m antiphon.demo.score PACKED``: score a packed model in this process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--per-skill", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="questions answered together")
    parser.add_argument("--answers", type=Path, help="where to write what was answered wrongly, as JSONL")
    parser.add_argument("--vocabulary", type=Path, default=VOCABULARY_FILE, help="that of the packed model")
    parser.add_argument("--metrics", type=Path, help="metrics.json of a training that lacks its scores")
    chosen = parser.parse_args()
    packed, vocabulary = read_packed(chosen.packed), load_vocabulary(chosen.vocabulary)
    if packed.token_ids != vocabulary.token_ids:
        raise CheckpointError(
            f"{chosen.packed}: was trained with another vocabulary than {chosen.vocabulary}"
        )
    model = TinyGptOss(packed.config, vocabulary.unseen, vocabulary.unseen_tokens)
    load_weights(model, packed.weights)
    scores = score_model(
        *(model, chosen.per_skill, chosen.answers), vocabulary_file=chosen.vocabulary, batch=chosen.batch
    )
    if chosen.metrics is not None:
        metrics = json.loads(chosen.metrics.read_text(encoding="utf-8"))
        chosen.metrics.write_text(json.dumps(metrics | {"scores": scores}), encoding="utf-8")


if __name__ == "__main__":
    main()
