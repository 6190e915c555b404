"""Repeating, reversing, counting and picking the words that the user gives."""

from __future__ import annotations

from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn, split_of
from antiphon.demo.phrasing import by_effort, fill, phrases, pick
from antiphon.demo.words import WordSource

LAYOUTS = {task: phrases(f"copying_{task}") for task in ("repeat", "reverse", "count", "pick")}
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def numbered(words: list[str]) -> str:
    """``1 a, 2 b, 3 c``."""
    return ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))


def backwards(words: list[str]) -> str:
    """``3 c, 2 b, 1 a``."""
    return ", ".join(f"{i} {word}" for i, word in reversed(list(enumerate(words, 1))))


def reply(task: str, words: list[str], effort: Effort, position: int = 0) -> tuple[AssistantTurn, str]:
    """Thought and answer of one task, and the text that must be in the answer."""
    text = " ".join(words)
    if task == "repeat":
        core, final, lead = "I repeat the text.", text, "The user wants the same words again."
        check = f"The words are: {numbered(words)}."
        return AssistantTurn(by_effort(effort, core, lead, check), final), text
    if task == "reverse":
        core = f"{numbered(words)}. Backwards: {backwards(words)}."
        lead, check = "I number the words and then go backwards.", "The last word comes first now."
        final = " ".join(reversed(words))
        return AssistantTurn(by_effort(effort, core, lead, check), final), final
    if task == "count":
        core, lead = f"{numbered(words)}. Total: {len(words)}.", "I number the words to count them."
        check = "The last number is the total."
        final = f"There are {len(words)} words." if len(words) != 1 else "There is 1 word."
        return AssistantTurn(
            by_effort(effort, core, lead, check), final
        ), f"{len(words)} word{'s' * (len(words) != 1)}"
    core = f"{numbered(words[: position + 1])}."
    lead, check = (
        f"I number the words up to the {ORDINALS[position]} one.",
        "The last one is what the user wants.",
    )
    final = f"The {ORDINALS[position]} word is {words[position]}."
    return AssistantTurn(by_effort(effort, core, lead, check), final), f"is {words[position]}."


def words_of(rng: Random, split: Split, words: WordSource, least: int = 2, most: int = 10) -> list[str]:
    """A list of words that belongs to a split."""
    while True:
        chosen = words.distinct_words(rng, rng.randint(least, most))
        style = rng.random()
        if style > 0.8:
            chosen = list(dict.fromkeys(words.piece(rng) for _ in chosen))
        elif style < 0.2:
            chosen = [word.capitalize() for word in chosen]
        elif style < 0.4:
            chosen = list(dict.fromkeys(words.oddity(rng) if rng.random() < 0.5 else word for word in chosen))
        elif style < 0.5:
            chosen[0] = chosen[0].capitalize()
        if split_of("words " + " ".join(chosen).lower()) is split:
            return chosen


DRILLS, LONGEST_DRILL = 0.6, 60
"""Share of the training's lists that are long, and their most words: few tokens of frame for many words."""


def drill_of(rng: Random, words: WordSource, most: int) -> list[str]:
    """A long list for training."""
    while True:
        chosen = words.drill(rng, rng.randint(8, most))
        if split_of("words " + " ".join(chosen).lower()) is Split.TRAIN:
            return chosen


def copying(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """One task on a list of words."""
    task = rng.choice(("repeat", "repeat", "reverse", "reverse", "count", "count", "pick"))
    if split is Split.TRAIN and rng.random() < DRILLS:
        task = rng.choice(("repeat", "repeat", "repeat", "reverse"))
        numbered_too = task == "reverse" or effort is Effort.HIGH  # the thought is longer than the answer
        chosen = drill_of(rng, words, 14 if numbered_too else LONGEST_DRILL)
    else:
        chosen = words_of(rng, split, words, least=1 if task in ("repeat", "count") else 2)
    position = rng.randrange(min(len(chosen), len(ORDINALS)))
    phrasing = pick(rng, LAYOUTS[task], split)
    separator = ", " if rng.random() < 0.12 and task != "repeat" else " "
    text = fill(phrasing, x=separator.join(chosen), o=ORDINALS[position])
    if rng.random() < 0.1 and text[-1] not in '?."':
        text += "."
    answer, expected = reply(task, chosen, effort, position)
    expect = Expect(equals=expected) if task in ("repeat", "reverse") else Expect(contains=(expected,))
    keys = (f"words {' '.join(chosen).lower()}", f"copying phrasing {phrasing}")
    return Example("copying", (UserTurn(text),), answer, expect, effort, keys=keys)
