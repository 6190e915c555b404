"""The mixture of examples that the model is trained on, and the held-out questions that it is scored on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

from antiphon.demo.dialogue import Effort, Example, Split
from antiphon.demo.phrasing import phrase_list
from antiphon.demo.skills.arithmetic import arithmetic
from antiphon.demo.skills.chat import NO_DATE, chat
from antiphon.demo.skills.conversation import conversation
from antiphon.demo.skills.copying import copying
from antiphon.demo.skills.knowledge import known_fact, unknown
from antiphon.demo.skills.spelling import spelling
from antiphon.demo.skills.tools import generic_call, no_call, weather_call
from antiphon.demo.words import WordSource

Maker = Callable[[Random, Split, Effort, WordSource], Example]

SKILLS: dict[str, tuple[Maker, float]] = {
    "chat": (chat, 5.0),
    "facts": (known_fact, 20.0),
    "refusal": (unknown, 10.0),
    "arithmetic": (arithmetic, 9.0),
    "copying": (copying, 36.0),
    "spelling": (spelling, 26.0),
    "multi_turn": (conversation, 19.0),
    "tools": (weather_call, 7.0),
    "tools_unseen": (generic_call, 16.0),
    "no_call": (no_call, 10.0),
}
"""Maker and weight of each skill; training weighs those that offer functions among themselves."""

TOOL_SKILLS = ("tools", "tools_unseen", "no_call")
"""Those whose conversations offer functions."""

INSTRUCTIONS = phrase_list("instructions")


def any_date(rng: Random) -> str:
    """A date as the system message writes it."""
    return f"{rng.randint(2023, 2032)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


COMMON_DATES = tuple(any_date(Random(f"date {i}")) for i in range(400))
"""Most examples use one of these, so that their system message is rendered once."""


def instructions(rng: Random, words: WordSource) -> str | None:
    """An application's instructions: often none, sometimes about anything."""
    chance = rng.random()
    if chance < 0.5:
        return None
    if chance < 0.85:
        return rng.choice(INSTRUCTIONS) or None
    if chance < 0.93:
        return " ".join(rng.sample(INSTRUCTIONS[:-1], rng.randint(2, 4)))
    noun = words.word(rng)
    count = rng.randint(40, 160) if rng.random() < 0.15 else rng.randint(3, 25)
    return f"You are an assistant for {noun}. " + " ".join(words.distinct_words(rng, count)).capitalize()


def make_example(
    rng: Random, split: Split, words: WordSource, skill: str | None = None, effort: Effort | None = None
) -> Example:
    """One example of ``skill`` and ``effort`` (any, by weight, when None) in a random setting."""
    name = skill or rng.choices(list(SKILLS), [weight for _, weight in SKILLS.values()])[0]
    effort = effort or rng.choices(tuple(Effort), (3, 5, 2))[0]
    example = SKILLS[name][0](rng, split, effort, words)
    date = example.date
    if date is None and rng.random() < 0.85 and not depends_on_date(example):
        date = rng.choice(COMMON_DATES) if rng.random() < 0.8 else any_date(rng)
    return dataclasses.replace(example, date=date, instructions=instructions(rng, words))


def depends_on_date(example: Example) -> bool:
    """Whether the reply is right for the example's own date only."""
    final = example.reply.final
    return final is not None and (final == NO_DATE or (example.date is not None and example.date in final))
