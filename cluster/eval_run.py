"""Scores a running server on question sets: how many it answers right, per skill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from antiphon.cluster.eval_client import EvaluationClient, EvaluationFailed, ServerAnswer, ServerOptions
from antiphon.demo.dataset import held_out_examples
from antiphon.demo.dialogue import Effort
from antiphon.demo.evaluate import EFFORT_SKILLS, Score, Verdict, table
from antiphon.demo.harmony import ENCODINGS_VARIABLE, encoding
from antiphon.demo.mixture import depends_on_date
from antiphon.demo.questions import Question, question_of
from antiphon.router.harmony.vocabulary import ranks_path

SEED = 1
"""Of the built-in questions."""


def built_in_questions(per_skill: int, skills: Sequence[str]) -> list[Question]:
    """Held-out questions of gpt-oss-tiny's skills, without those whose answer needs a date of their own."""
    load_encoding()
    examples = held_out_examples(SEED, per_skill, tuple(skills))
    return [question_of(example) for example in examples if not depends_on_date(example)]


def load_encoding() -> None:
    """Point the library's loader at the vocabulary that the package ships; it has no other way to be told."""
    before = os.environ.get(ENCODINGS_VARIABLE)
    os.environ[ENCODINGS_VARIABLE] = str(ranks_path().parent)
    try:
        encoding()  # kept by the module
    finally:
        if before is None:
            del os.environ[ENCODINGS_VARIABLE]
        else:
            os.environ[ENCODINGS_VARIABLE] = before


async def effort_line(client: EvaluationClient, questions: Sequence[Question]) -> Score:
    """How often the thought grows from low over medium to high effort on the same question."""
    lengths: list[list[int]] = [[] for _ in questions]
    for effort in Effort:
        answers = await client.ask_all([question.with_effort(effort) for question in questions])
        for row, answer in zip(lengths, answers, strict=True):
            row.append(len(answer.reply.analysis) if answer.finished and answer.reply else -1)
    return Score(sum(0 <= low < medium < high for low, medium, high in lengths), len(questions))


async def evaluate(
    options: ServerOptions, questions: Sequence[Question], efforts: bool
) -> tuple[dict[str, Score], list[tuple[Verdict, ServerAnswer]]]:
    """Ask everything; the table, and every verdict with the answer it is about.

    Raises:
        EvaluationFailed: no question was answered.
    """
    async with EvaluationClient(options) as client:
        with tqdm(total=len(questions), desc="questions", file=sys.stderr, disable=None) as bar:
            answers = await client.ask_all(questions, lambda: bar.update() and None)
        if all(answer.problem for answer in answers):
            raise EvaluationFailed(f"{options.base_url}: no answer: {answers[0].problem}")
        judged = [(answer.verdict(q), answer) for q, answer in zip(questions, answers, strict=True)]
        scores = table(verdict for verdict, _ in judged)
        compared = [q for q in questions if q.skill in EFFORT_SKILLS] if efforts else []
        if compared and options.effort is None:
            scores["effort"] = await effort_line(client, compared)
    return scores, judged


def write_wrong(judged: Sequence[tuple[Verdict, ServerAnswer]], path: Path) -> None:
    """Every question that was not answered right, with the answer, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for verdict, answer in judged:
            if not verdict.right:
                reply = answer.reply
                got = {
                    "reasoning": reply.analysis if reply else None,
                    "content": reply.final if reply else None,
                    "call": {"name": reply.call.name, "arguments": reply.call.arguments}
                    if reply and reply.call
                    else None,
                    "finished": answer.finished,
                    "problem": answer.problem,
                }
                line = verdict.question.to_json() | {"got": got}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
