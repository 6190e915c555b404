"""A question as a chat API takes it, and what a right answer is; one JSON object each in a question set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from antiphon.demo.dialogue import (
    AssistantTurn,
    Effort,
    Example,
    Expect,
    Tool,
    ToolCall,
    ToolTurn,
    Turn,
    UserTurn,
)

Message = dict[str, Any]
"""A message of the chat-completions API, as JSON."""


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation to continue.

    Attributes:
        messages: as in a chat-completions request (developer, user, assistant, tool).
        tools: as in a chat-completions request.
        effort: ``reasoning_effort``.
        date: ``Current date`` of the system message, where the asker controls it.
    """

    skill: str
    messages: tuple[Message, ...]
    expect: Expect
    tools: tuple[Message, ...] = ()
    effort: Effort = Effort.MEDIUM
    date: str | None = None

    def with_effort(self, effort: Effort) -> Question:
        """The same question with another effort."""
        return dataclasses.replace(self, effort=effort)

    def to_json(self) -> Message:
        """As one line of a question set."""
        tree: Message = {"skill": self.skill, "messages": list(self.messages), "effort": str(self.effort)}
        if self.tools:
            tree["tools"] = list(self.tools)
        if self.date is not None:
            tree["date"] = self.date
        expect: Message = {}
        if self.expect.contains:
            expect["contains"] = list(self.expect.contains)
        if self.expect.equals is not None:
            expect["equals"] = self.expect.equals
        for name in ("exact", "number", "choice"):
            if (value := getattr(self.expect, name)) is not None:
                expect[name] = value
        if self.expect.call is not None:
            expect["call"] = dataclasses.asdict(self.expect.call)
        if self.expect.refusal:
            expect["refusal"] = True
        return tree | {"expect": expect}

    @staticmethod
    def from_json(tree: Message) -> Question:
        """Read ``to_json``'s form; ``messages`` and ``expect`` are required.

        Raises:
            ValueError, KeyError, TypeError: a missing key, an unknown one, or a value of the wrong kind.
        """
        unknown = set(tree) - {"skill", "messages", "effort", "tools", "date", "expect"}
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        expect = dict(tree["expect"])
        call = expect.pop("call", None)
        judged = Expect(
            contains=tuple(expect.pop("contains", ())),
            equals=expect.pop("equals", None),
            exact=expect.pop("exact", None),
            number=expect.pop("number", None),
            choice=expect.pop("choice", None),
            call=ToolCall(**call) if call is not None else None,
            refusal=bool(expect.pop("refusal", False)),
        )
        if expect:
            raise ValueError(f"unknown key 'expect.{min(expect)}'")
        return Question(
            str(tree.get("skill", "questions")),
            tuple(tree["messages"]),
            judged,
            tuple(tree.get("tools", ())),
            Effort(tree.get("effort", "medium")),
            tree.get("date"),
        )


def question_of(example: Example) -> Question:
    """An example without its reply."""
    messages: list[Message] = []
    if example.instructions is not None:
        messages.append({"role": "developer", "content": example.instructions})
    calls = 0
    for turn in example.turns:
        if isinstance(turn, AssistantTurn) and turn.call is not None:
            calls += 1
        messages.append(_message(turn, f"call_{calls}"))
    tools = tuple(
        {"type": "function", "function": {k: v for k, v in dataclasses.asdict(tool).items() if v is not None}}
        for tool in example.tools
    )
    return Question(example.skill, tuple(messages), example.expect, tools, example.effort, example.date)


def _message(turn: Turn, call_id: str) -> Message:
    if isinstance(turn, UserTurn):
        return {"role": "user", "content": turn.text}
    if isinstance(turn, ToolTurn):
        return {"role": "tool", "tool_call_id": call_id, "content": turn.text}
    message: Message = {"role": "assistant", "content": turn.final}
    if turn.analysis:
        message["reasoning"] = turn.analysis
    if turn.call is not None:
        function = {"name": turn.call.name, "arguments": turn.call.arguments}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message


def prompt_parts(question: Question) -> tuple[tuple[Turn, ...], tuple[Tool, ...], str | None]:
    """(turns, tools, instructions) of a question, for rendering in this process."""
    turns: list[Turn] = []
    instructions: str | None = None
    names: dict[str, str] = {}
    for message in question.messages:
        role, content = message["role"], message["content"]
        if role in ("system", "developer"):
            instructions = content
        elif role == "user":
            turns.append(UserTurn(content))
        elif role == "tool":
            turns.append(ToolTurn(names[message["tool_call_id"]], content))
        else:
            call = None
            for entry in message.get("tool_calls", ()):
                names[entry["id"]] = entry["function"]["name"]
                call = ToolCall(entry["function"]["name"], entry["function"]["arguments"])
            turns.append(AssistantTurn(message.get("reasoning", ""), content, call))
    tools = tuple(
        Tool(
            entry["function"]["name"],
            entry["function"].get("description", ""),
            entry["function"].get("parameters"),
        )
        for entry in question.tools
    )
    return tuple(turns), tools, instructions
