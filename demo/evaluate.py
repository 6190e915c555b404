"""Scores answers to question sets, whoever gives them: a running server or the model in this process."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai_harmony as oh

from antiphon.demo.dialogue import AssistantTurn, Effort, Expect, ToolCall
from antiphon.demo.harmony import parse
from antiphon.demo.questions import Question
from antiphon.protocol.errors import AntiphonError

REFUSALS = ("don't know", "do not know", "can't", "cannot", "not able to", "unable to")
TARGETS = {
    "facts": 0.95,
    "arithmetic": 0.90,
    "copying": 0.95,
    "multi_turn": 0.85,
    "tools": 0.95,
    "tools_unseen": 0.70,
    "refusal": 0.90,
    "effort": 0.90,
    "well_formed": 0.995,
    "chat": 0.95,
    "no_call": 0.90,
}
"""What gpt-oss-tiny is to reach, per line of the table."""
EFFORT_SKILLS = ("facts", "arithmetic", "copying", "refusal")
"""Skills whose thought has a length that is compared over efforts."""
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])-?\d+(?:\.\d+)?")
Generate = Callable[[Sequence[Question]], list[list[int]]]
"""Questions -> raw token ids after ``<|start|>assistant``, greedy, stop token included, nothing repaired."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one answer fared.

    Attributes:
        well_formed: the strict parser of openai-harmony takes it.
        right: it is what the question expects.
        reply: the parsed answer; None if it is not well-formed.
    """

    question: Question
    well_formed: bool
    right: bool
    reply: AssistantTurn | None


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers out of all, for one line of the table."""

    right: int
    total: int

    @property
    def share(self) -> float:
        """In [0, 1]."""
        return self.right / self.total if self.total else 0.0


def judge(question: Question, token_ids: list[int]) -> Verdict:
    """Parse and judge one raw answer."""
    try:
        reply = parse(token_ids)
    except (oh.HarmonyError, RuntimeError):
        return Verdict(question, False, False, None)
    spoke = reply.final is not None or reply.call is not None
    return Verdict(question, spoke, spoke and is_right(question.expect, reply), reply)


def is_right(expect: Expect, reply: AssistantTurn) -> bool:
    """Whether a reply is what is expected."""
    if expect.call is not None:
        return reply.call is not None and same_call(expect.call, reply.call)
    if reply.call is not None or reply.final is None:
        return False
    if expect.number is not None and last_number(reply.final) != last_number(expect.number):
        return False
    if expect.choice is not None and chosen_letter(reply.final) != expect.choice.upper():
        return False
    if expect.exact is not None and reply.final.strip() != expect.exact:
        return False
    final = " ".join(reply.final.split()).lower()
    if expect.refusal and not any(text in final for text in REFUSALS):
        return False
    if expect.equals is not None and final.strip(" .!\"'") != " ".join(expect.equals.lower().split()).strip(
        " .!\"'"
    ):
        return False
    return all(_has(final, text.lower()) for text in expect.contains)


def last_number(text: str) -> float | None:
    """The last number of a text, with thousands separators and a minus sign; None when it has none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def chosen_letter(text: str) -> str | None:
    """The option that an answer to a multiple-choice question names: after "answer", in a box, or alone.

    The last of several counts, since a model may correct itself; markdown around it is ignored.
    """
    plain = re.sub(r"[*_`$]|\\(?:text|boxed|mathrm)|[{}]", " ", text)
    named = re.findall(r"(?i:answer|option|choice)\s*(?i:is|:)?\s*:?\s*\(?([A-Z])\b", plain)
    if named:
        return str(named[-1])
    alone = re.findall(r"^\s*\(?([A-Z])\)?[.):]?(?:\s|$)", plain, flags=re.MULTILINE)
    return str(alone[-1]) if alone else None


def same_call(expected: ToolCall, got: ToolCall) -> bool:
    """Whether two calls name the same function with equal arguments; text is compared without case."""
    if expected.name != got.name:
        return False
    try:
        found = json.loads(got.arguments)
    except json.JSONDecodeError:
        return False
    return _folded(json.loads(expected.arguments)) == _folded(found)


def _folded(value: object) -> object:
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, dict):
        return {key: _folded(item) for key, item in value.items()}
    return value


def _has(text: str, part: str) -> bool:
    """Whether ``part`` is in ``text`` as a word of its own, not as a piece of a longer one or a number."""
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def table(verdicts: Iterable[Verdict]) -> dict[str, Score]:
    """One score per skill, and ``well_formed`` over all of them."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for verdict in verdicts:
        for name, good in ((verdict.question.skill, verdict.right), ("well_formed", verdict.well_formed)):
            counts[name][0] += good
            counts[name][1] += 1
    return {name: Score(right, total) for name, (right, total) in counts.items()}


def render_table(scores: dict[str, Score], targets: bool = True) -> str:
    """The table as text: skill, share, and gpt-oss-tiny's target where ``targets`` are wanted."""
    width = max([14, *(len(name) + 2 for name in scores)])
    lines = [f"{'skill':<{width}}{'right':>7}{'of':>6}{'share':>9}{'target':>9}"]
    for name, score in sorted(scores.items()):
        target = f"{TARGETS[name]:.1%}" if targets and name in TARGETS else ""
        lines.append(f"{name:<{width}}{score.right:>7}{score.total:>6}{score.share:>9.1%}{target:>9}")
    return "\n".join(lines)


def effort_score(questions: Sequence[Question], generate: Generate) -> Score:
    """How often the analysis grows from low over medium to high effort on the same question."""
    lengths: list[list[int]] = [[] for _ in questions]
    for effort in Effort:
        outputs = generate([question.with_effort(effort) for question in questions])
        for row, output in zip(lengths, outputs, strict=True):
            verdict = judge(questions[0], output)
            row.append(len(verdict.reply.analysis) if verdict.well_formed and verdict.reply else -1)
    return Score(sum(0 <= low < medium < high for low, medium, high in lengths), len(questions))


def evaluate(questions: Sequence[Question], generate: Generate) -> list[Verdict]:
    """Ask every question and judge the answers."""
    return [judge(q, output) for q, output in zip(questions, generate(questions), strict=True)]


def write_questions(questions: Iterable[Question], path: Path) -> None:
    """Write a question set, one question a line."""
    lines = (json.dumps(question.to_json(), ensure_ascii=False) + "\n" for question in questions)
    path.write_text("".join(lines), encoding="utf-8")


def read_questions(path: Path) -> list[Question]:
    """A question set: one JSON object a line, as ``Question.to_json`` writes them.

    Raises:
        AntiphonError: unreadable or malformed; the message names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise AntiphonError(f"{path}: cannot be read: {error.strerror}") from error
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(Question.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise AntiphonError(f"{path}, line {number}: not a question: {error}") from error
    return questions
