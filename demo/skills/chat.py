"""Greetings, thanks, and what the model says of itself."""

from __future__ import annotations

from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn
from antiphon.demo.phrasing import by_effort, pick
from antiphon.demo.words import WordSource

GREETING = "Hello! How can I help you?"
IDENTITY = "I am gpt-oss-tiny, a small demonstration model with the GPT-OSS architecture. I was trained to show Antiphon at work."
ABILITIES = "I can answer simple facts, do arithmetic with small numbers, repeat, reverse and count words, and call functions."

TOPICS: tuple[tuple[dict[Split, tuple[str, ...]], str, str, tuple[str, ...]], ...] = (
    (
        {
            Split.TRAIN: (
                "Hi", "Hello", "Hello!", "Hi!", "Hey", "Hey there!", "Good morning", "Good morning!", "Good evening.",
                "Hello there", "Hi there", "Greetings", "Hello, how are you?", "How are you?", "Hi, how are you?",
                "How are you doing?", "hello", "hi", "Good afternoon!", "Hey!", "Hello, can you help me?", "Say hi",
                "Say hello", "Say hello.", "Are you there?", "Hello world", "Test", "ping", "Can you help me?",
            ),
            Split.HELD_OUT: ("Hello there!", "Good evening!", "Hi there!", "hey", "How are you today?", "Good day."),
        },
        "The user greets me.", GREETING, ("Hello",),
    ),
    (
        {
            Split.TRAIN: (
                "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
                "Which model are you?", "Are you ChatGPT?", "Are you a human?", "Who made you?", "Introduce yourself.",
                "Are you an AI?", "What model is this?", "Who am I talking to?", "who are you", "Are you GPT-4?",
                "Please introduce yourself.", "Who created you?", "Do you have a name?", "What kind of model are you?",
                "Who trained you?", "What is Antiphon?", "Are you a robot?", "Describe yourself.",
            ),
            Split.HELD_OUT: (
                "Hello, who are you?", "Can you introduce yourself?", "Tell me your name.", "What model are you?",
                "Who built you?",
            ),
        },
        "The user asks who I am.", IDENTITY, ("gpt-oss-tiny",),
    ),
    (
        {
            Split.TRAIN: (
                "What can you do?", "What can I ask you?", "Help", "help", "What do you know?", "How can you help me?",
                "What are you able to do?", "What are your skills?", "What can you help me with?", "What are you good at?",
            ),
            Split.HELD_OUT: ("What can you do for me?", "Which things can you do?", "What are your abilities?"),
        },
        "The user asks what I can do.", ABILITIES, ("arithmetic",),
    ),
    (
        {
            Split.TRAIN: (
                "Thanks", "Thank you", "Thanks!", "Thank you!", "Thanks a lot!", "Great, thanks!", "Thank you very much.",
                "Perfect, thank you.", "thanks", "Cool, thanks.", "That was helpful.", "Well done!",
            ),
            Split.HELD_OUT: ("Many thanks!", "Thank you so much!", "Great, thank you."),
        },
        "The user thanks me.", "You're welcome!", ("welcome",),
    ),
    (
        {
            Split.TRAIN: (
                "Bye", "Goodbye", "Bye!", "Goodbye!", "See you later.", "See you!", "Good night.", "Bye bye",
                "That is all, goodbye.",
            ),
            Split.HELD_OUT: ("Bye for now!", "Good night!", "See you soon."),
        },
        "The user says goodbye.", "Goodbye! Have a nice day.", ("Goodbye",),
    ),
)  # fmt: skip
TODAY = {
    Split.TRAIN: (
        "What is the date today?", "What date is it?", "What's the date?", "Tell me today's date.", "Which date is today?",
        "What is today's date?", "What is the current date?", "Give me the current date.", "Today's date?",
    ),
    Split.HELD_OUT: ("What's today's date?", "Which date do we have today?", "Please tell me the date."),
}  # fmt: skip


def reply(lead: str, final: str, effort: Effort) -> AssistantTurn:
    """Thought and answer of a topic."""
    thought = by_effort(effort, lead, "This is an easy one.", "A short and friendly answer is enough.")
    return AssistantTurn(thought, final)


def chat(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """Small talk."""
    if rng.random() < 0.15:
        return _today(rng, split, effort)
    phrasings, lead, final, contains = rng.choices(TOPICS, (4, 4, 2, 1.5, 1.5))[0]
    text = pick(rng, phrasings, split)
    keys = (f"chat phrasing {text}",)
    return Example(
        "chat", (UserTurn(text),), reply(lead, final, effort), Expect(contains=contains), effort, keys=keys
    )


def _today(rng: Random, split: Split, effort: Effort) -> Example:
    """The date is in the system message, or nobody knows it."""
    text = pick(rng, TODAY, split)
    date = f"{rng.randint(2023, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if rng.random() < 0.15:
        thought = by_effort(
            effort, "No date is given.", "The user asks for the date.", "I say that I don't know it."
        )
        expect, turn = Expect(refusal=True), AssistantTurn(thought, "I'm sorry, I don't know today's date.")
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
