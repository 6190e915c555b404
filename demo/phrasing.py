"""How a user may put things: frames around a noun phrase, greetings before it, thanks after it, sloppy typing.

Frames are split by list: those in ``*_HELD_OUT`` are never used in training.
"""

from __future__ import annotations

from random import Random

from antiphon.demo.dialogue import Effort, Split

FRAMES = {
    Split.TRAIN: (
        "What is {x}?",
        "What's {x}?",
        "Tell me {x}.",
        "Please tell me {x}.",
        "Give me {x}.",
        "Do you know {x}?",
        "Can you tell me {x}?",
        "{x}?",
        "{x}",
        "I want to know {x}.",
        "I would like to know {x}.",
        "Name {x}.",
        "Could you give me {x}?",
        "Could you tell me {x}?",
        "Say {x}.",
        "I need {x}.",
        "I need to know {x}.",
        "Can you name {x}?",
        "Let me know {x}.",
        "What would be {x}?",
        "Can you tell me what {x} is?",
        "Do you know what {x} is?",
        "Please name {x}.",
        "I forgot {x}. What is it?",
        "Answer this: what is {x}?",
        "Find {x}.",
    ),
    Split.HELD_OUT: (
        "Could you tell me {x}, please?",
        "I'm looking for {x}.",
        "Would you tell me {x}?",
        "So what is {x}?",
        "Please let me know what {x} is.",
        "I'd like to know {x}.",
    ),
}
OPENINGS = {
    Split.TRAIN: (
        "Hi! ",
        "Hello, ",
        "Hey, ",
        "Quick question: ",
        "Question: ",
        "Hello! ",
        "Please help me. ",
    ),
    Split.HELD_OUT: ("Hi there. ", "One question: ", "Good day! "),
}
CLOSINGS = {
    Split.TRAIN: (" Thanks!", " Thank you.", " Please.", " Thanks."),
    Split.HELD_OUT: (" Thanks in advance.", " Thank you!"),
}


def pick(rng: Random, options: dict[Split, tuple[str, ...]], split: Split) -> str:
    """One of the split's options."""
    return rng.choice(options[split])


def fill(template: str, **values: str) -> str:
    """``template`` with its fields replaced and its first letter in upper case."""
    text = template
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text[:1].upper() + text[1:]


def dress(rng: Random, text: str, split: Split) -> str:
    """``text`` as typed by one of many users: with a greeting, thanks, in lower case or without a full stop."""
    chance = rng.random()
    if chance < 0.12:
        text = pick(rng, OPENINGS, split) + (text if rng.random() < 0.6 else text[:1].lower() + text[1:])
    elif chance < 0.2 and text[-1:] in ".?!":
        text += pick(rng, CLOSINGS, split)
    elif chance < 0.28:
        text = text.lower()
    if rng.random() < 0.1 and text[-1:] in ".?!":
        text = text[:-1]
    if rng.random() < 0.02:
        text += "\n"
    return text


def by_effort(effort: Effort, core: str, lead: str, check: str) -> str:
    """An analysis of the length that the effort asks for: core, lead + core, lead + core + check."""
    if effort is Effort.LOW:
        return core
    if effort is Effort.MEDIUM:
        return f"{lead} {core}"
    return f"{lead} {core} {check}"


def joined(items: list[str]) -> str:
    """Words separated by spaces."""
    return " ".join(items)
