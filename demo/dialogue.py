"""What the demo model is taught and asked: conversations with a reply, as plain data.

The shapes are those of a chat API (user, assistant, tool), so that an example can be rendered for training,
written as a question for a server, and read back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum


class Effort(StrEnum):
    """The ``Reasoning:`` line of the system message."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Split(StrEnum):
    """Which phrasings, operands and names an example may use; the two never share one."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client offers; ``parameters`` is its JSON schema, None when it takes nothing."""

    name: str
    description: str
    parameters: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user says."""

    text: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """What the assistant thought, and then either said or called."""

    analysis: str
    final: str | None = None
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """What a function returned."""

    name: str
    text: str


Turn = UserTurn | AssistantTurn | ToolTurn


@dataclass(frozen=True, slots=True)
class Expect:
    """How an answer is judged. Every field that is set must hold.

    Attributes:
        contains: texts that the final answer has, ignoring case.
        equals: the final answer, ignoring case and surrounding punctuation.
        exact: the final answer, to the letter.
        number: the last number of the final answer, compared as a number.
        choice: the letter of the option that the final answer names.
        call: the function to call, with these arguments (compared as JSON values).
        refusal: the final answer says that it does not know or cannot.
    """

    contains: tuple[str, ...] = ()
    equals: str | None = None
    exact: str | None = None
    number: str | None = None
    choice: str | None = None
    call: ToolCall | None = None
    refusal: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation up to the point where the model speaks, the reply it should give, and the judge."""

    skill: str
    turns: tuple[Turn, ...]
    reply: AssistantTurn
    expect: Expect
    effort: Effort = Effort.MEDIUM
    tools: tuple[Tool, ...] = ()
    instructions: str | None = None
    """The application's own instructions (its system or developer message)."""
    date: str | None = None
    """``Current date`` of the system message, YYYY-MM-DD."""
    keys: tuple[str, ...] = field(default=())
    """What must not occur in both splits: phrasings, operands, names."""


def split_of(key: str, held_out_percent: int = 10) -> Split:
    """The split that owns ``key``; stable over runs and machines."""
    digest = hashlib.sha256(key.encode()).digest()
    return Split.HELD_OUT if digest[0] * 100 < held_out_percent * 256 else Split.TRAIN
