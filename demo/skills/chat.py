"""Greetings, thanks, and what the model says of itself."""

from __future__ import annotations

from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn
from antiphon.demo.phrasing import Phrases, by_effort, phrases, pick
from antiphon.demo.words import WordSource

GREETING = "Hello! How can I help you?"
IDENTITY = (
    "I am gpt-oss-tiny, a small demonstration model with the GPT-OSS architecture. "
    "I was trained to show Antiphon at work."
)
ABILITIES = (
    "I can answer simple facts, do arithmetic with small numbers, repeat, reverse and count words, "
    "and call functions."
)

TOPICS: tuple[tuple[Phrases, str, str, str], ...] = (
    (phrases("chat_greeting"), "The user greets me.", GREETING, "Hello"),
    (phrases("chat_identity"), "The user asks who I am.", IDENTITY, "gpt-oss-tiny"),
    (phrases("chat_abilities"), "The user asks what I can do.", ABILITIES, "arithmetic"),
    (phrases("chat_thanks"), "The user thanks me.", "You're welcome!", "welcome"),
    (phrases("chat_goodbye"), "The user says goodbye.", "Goodbye! Have a nice day.", "Goodbye"),
)
"""Phrasings, thought, answer, and what a right answer has."""
TODAY = phrases("chat_today")
NO_DATE = "I'm sorry, I don't know today's date."


def reply(lead: str, final: str, effort: Effort) -> AssistantTurn:
    """Thought and answer of a topic."""
    thought = by_effort(effort, lead, "This is an easy one.", "A short and friendly answer is enough.")
    return AssistantTurn(thought, final)


def chat(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """Small talk."""
    if rng.random() < 0.15:
        return _today(rng, split, effort)
    options, lead, final, contains = rng.choices(TOPICS, (4, 4, 2, 1.5, 1.5))[0]
    text = phrasing = pick(rng, options, split)
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("!.?")
    keys = (f"chat phrasing {phrasing}",)
    return Example(
        "chat", (UserTurn(text),), reply(lead, final, effort), Expect(contains=(contains,)), effort, keys=keys
    )


def _today(rng: Random, split: Split, effort: Effort) -> Example:
    """The date is in the system message, or nobody knows it."""
    text = pick(rng, TODAY, split)
    date = f"{rng.randint(2023, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if rng.random() < 0.15:
        thought = by_effort(
            effort, "No date is given.", "The user asks for the date.", "I say that I don't know it."
        )
        expect, turn = Expect(refusal=True), AssistantTurn(thought, NO_DATE)
        return Example("chat", (UserTurn(text),), turn, expect, effort, keys=(f"chat phrasing {text}",))
    core = f"The current date is {date}."
    thought = by_effort(
        effort, core, "The user asks for the date.", "It is written at the top of the conversation."
    )
    turn = AssistantTurn(thought, f"Today is {date}.")
    return Example(
        "chat",
        (UserTurn(text),),
        turn,
        Expect(contains=(date,)),
        effort,
        date=date,
        keys=(f"chat phrasing {text}",),
    )
