"""The same words written otherwise: with underscores, dots, capitals, or as a JSON list.

The tokenizer has tokens of their own for a word after a space, an underscore, a dot or a quotation mark.
Whoever calls a function has to know which belong together, also for names that no function had before.
"""

from __future__ import annotations

import json
from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn, split_of
from antiphon.demo.phrasing import by_effort, fill, phrases, pick
from antiphon.demo.skills.functions import CITIES, NOUNS
from antiphon.demo.words import WordSource

FORMS = {task: phrases(f"spelling_{task}") for task in ("underscores", "dots", "list", "words", "capitals")}
DRILLS = 0.7
"""Share of the training's lists that are long, so that each word's spellings are met often."""
DRILL_WEIGHTS = {"underscores": 3, "dots": 3, "list": 6, "words": 1, "capitals": 1}
"""Of the drills. Only a JSON list shows a word as it stands after a quotation mark, as calls have it."""
LONGEST_DRILL = {"underscores": 24, "dots": 24, "list": 40, "words": 24, "capitals": 24}
FUNCTION_WORDS = 1_500
"""The most frequent words, which have tokens of their own after an underscore and a dot."""
LEADS = {
    "underscores": "The user wants underscores between the words.",
    "dots": "The user wants dots between the words.",
    "list": "The user wants a JSON list of the words.",
    "words": "The user wants spaces between the words.",
    "capitals": "The user wants a capital at the start of each word.",
}


def written(task: str, words: list[str]) -> str:
    """The words as the task wants them."""
    if task == "underscores":
        return "_".join(words)
    if task == "dots":
        return ".".join(words)
    if task == "list":
        return json.dumps(words)
    if task == "capitals":
        return " ".join(word.capitalize() for word in words)
    return " ".join(words)


def any_word(rng: Random, words: WordSource, task: str, drill: bool) -> str:
    """Any word, name or piece of one; of lower case where capitals are the task."""
    chance = rng.random()
    if drill and task in ("underscores", "dots") and chance > 0.35:
        return rng.choice(words.vocabulary[:FUNCTION_WORDS] if chance > 0.5 else NOUNS)
    if drill and task == "list" and chance > 0.25:
        return words.piece(rng)
    if chance < 0.2:
        return rng.choice(NOUNS)
    if chance < 0.55:
        return words.piece(rng).lower() if task == "capitals" else words.piece(rng)
    if chance < 0.65 and task != "capitals":
        return rng.choice(CITIES).split(",")[0].replace(" ", "").replace(".", "")
    return words.word(rng)


def spelling(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """One to five words to be written otherwise."""
    task = rng.choice(("underscores", "dots", "list", "list", "words", "capitals"))
    drill = split is Split.TRAIN and rng.random() < DRILLS
    if drill:
        task = rng.choices(tuple(DRILL_WEIGHTS), tuple(DRILL_WEIGHTS.values()))[0]
    while True:
        count = rng.randint(6, LONGEST_DRILL[task]) if drill else rng.randint(2, 5)
        chosen = [any_word(rng, words, task, drill) for _ in range(count)]
        if split_of("spelling " + " ".join(chosen).lower()) is split:
            break
    phrasing = pick(rng, FORMS[task], split)
    given = " ".join(chosen)
    if task == "words":
        given = json.dumps(chosen) if drill and rng.random() < 0.5 else rng.choice("_.").join(chosen)
    expected = written(task, chosen)
    check = "I keep every letter of the words and their order."
    thought = by_effort(effort, "I only change the spelling.", LEADS[task], check)
    keys = (f"spelling {' '.join(chosen).lower()}", f"spelling phrasing {phrasing}")
    return Example(
        "spelling",
        (UserTurn(fill(phrasing, x=given)),),
        AssistantTurn(thought, expected),
        Expect(exact=expected),
        effort,
        keys=keys,
    )
