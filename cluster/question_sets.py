"""Question sets: those that are built in, and JSONL files in the forms that public sets have.

A line is one JSON object, in one of three forms:

- ``{"messages": [...], "expect": {...}}``: a conversation as in a chat request, and what a right answer is;
- ``{"question": "...", "choices": ["...", ...], "answer": "B"}``: multiple choice; the answer is the letter,
  the number of the option counted from 0, or its text;
- ``{"question": "...", "answer": "... #### 72"}``: a number; the text before ``####`` is left out.

``skill`` names the line of the table (the file's name when absent) and ``effort`` the reasoning effort.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from antiphon.demo.dialogue import Effort, Expect
from antiphon.demo.evaluate import last_number
from antiphon.demo.questions import Question
from antiphon.protocol.errors import AntiphonError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHOICE_REQUEST = 'Answer with the letter of the right option, in the form "Answer: X".'
NUMBER_REQUEST = 'Give the result as a number on the last line, in the form "Answer: N".'


class QuestionSetError(AntiphonError):
    """A question set cannot be read; names the file and the line."""


def read_question_set(path: Path) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        QuestionSetError: unreadable, empty, or a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise QuestionSetError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise QuestionSetError(f"{path}: is not UTF-8 text") from error
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(question_of_line(json.loads(line), path.stem))
            except (ValueError, KeyError, TypeError) as error:
                raise QuestionSetError(f"{path}, line {number}: not a question: {error}") from error
    if not questions:
        raise QuestionSetError(f"{path}: has no question")
    return questions


def question_of_line(tree: Any, default_skill: str) -> Question:
    """One line of a set, parsed.

    Raises:
        ValueError, KeyError, TypeError: none of the forms above.
    """
    if not isinstance(tree, dict):
        raise TypeError("a line has to be a JSON object")
    if "messages" in tree:
        return Question.from_json({"skill": default_skill} | tree)
    unknown = set(tree) - {"question", "choices", "answer", "skill", "effort"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}")
    asked = str(tree["question"])
    if "choices" in tree:
        text, expect = _multiple_choice(asked, tree["choices"], tree["answer"])
    else:
        text, expect = f"{asked}\n\n{NUMBER_REQUEST}", _numeric(tree["answer"])
    message = {"role": "user", "content": text}
    effort = Effort(tree.get("effort", "medium"))
    return Question(str(tree.get("skill", default_skill)), (message,), expect, effort=effort)


def _multiple_choice(asked: str, choices: Any, answer: Any) -> tuple[str, Expect]:
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"'choices' has to be a list of 2 to {len(LETTERS)} texts")
    options = [str(choice) for choice in choices]
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    letter = _letter_of(options, answer)
    return "\n".join((asked, "", *lines, "", CHOICE_REQUEST)), Expect(choice=letter)


def _letter_of(options: list[str], answer: Any) -> str:
    """The letter of the right option, given as a letter, a number from 0, or the option's text."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return LETTERS[answer]
    if isinstance(answer, str) and answer in options:
        return LETTERS[options.index(answer)]
    if isinstance(answer, str) and re.fullmatch(r"[A-Za-z]", answer.strip()):
        letter = answer.strip().upper()
        if LETTERS.index(letter) < len(options):
            return letter
    raise ValueError(f"'answer' names none of the {len(options)} choices: {answer!r}")


def _numeric(answer: Any) -> Expect:
    text = str(answer).rpartition("####")[2].strip()
    if last_number(text) is None:
        raise ValueError(f"'answer' has no number: {answer!r}")
    return Expect(number=text)
