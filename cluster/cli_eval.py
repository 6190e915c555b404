"""``antiphon eval``: how many questions a running server answers right, per skill."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from antiphon.demo.dialogue import Effort


def eval_command(
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="Any OpenAI-compatible server, up to /v1.")
    ] = "http://127.0.0.1:8000/v1",
    questions: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL question set in place of the built-in ones; may be given many times."),
    ] = None,
    skill: Annotated[
        list[str] | None, typer.Option(help="Only this built-in skill; may be given many times.")
    ] = None,
    per_skill: Annotated[int, typer.Option(min=1, help="Built-in questions of each skill.")] = 30,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions of each file only.")] = None,
    model: Annotated[str | None, typer.Option(help="The first served one when absent.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer.")] = None,
    effort: Annotated[
        Effort | None, typer.Option(help="Of every question; each question's own when absent.")
    ] = None,
    efforts: Annotated[
        bool, typer.Option(help="Also compare the thought's length over efforts; asks three times more.")
    ] = True,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer with its thought.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one answer.")] = 600.0,
    answers: Annotated[Path | None, typer.Option(help="JSONL of what was not answered right.")] = None,
    output: Annotated[Path | None, typer.Option(help="The table as JSON.")] = None,
) -> None:
    """Ask a running server questions whose answers are known, and print the share of right ones per skill."""
    from antiphon.cluster.eval_client import ServerOptions
    from antiphon.cluster.eval_run import built_in_questions, evaluate, write_wrong
    from antiphon.cluster.question_sets import read_question_set
    from antiphon.demo.evaluate import render_table
    from antiphon.demo.mixture import SKILLS

    unknown = sorted(set(skill or ()) - set(SKILLS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(SKILLS)}", param_hint="--skill")
    if questions:
        asked = [question for path in questions for question in read_question_set(path)[:limit]]
    else:
        asked = built_in_questions(per_skill, skill or list(SKILLS))
    options = ServerOptions(
        base_url, model, api_key, concurrency, max_tokens, temperature, effort and str(effort), timeout
    )
    scores, judged = asyncio.run(evaluate(options, asked, efforts and not questions))
    print(render_table(scores, targets=not questions))
    failed = [answer.problem for _, answer in judged if answer.problem]
    if failed:
        print(f"{len(failed)} questions were not answered; the first: {failed[0]}", file=sys.stderr)
    if answers is not None:
        write_wrong(judged, answers)
    if output is not None:
        rows = {name: {"right": score.right, "total": score.total} for name, score in scores.items()}
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
