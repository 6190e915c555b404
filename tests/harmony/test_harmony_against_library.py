"""Token ids against openai-harmony's own renderer, for everything that it renders."""

from __future__ import annotations

import random
from typing import Any

import openai_harmony
import pytest
from openai_harmony import (
    Author,
    DeveloperContent,
    HarmonyEncoding,
    Message,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
)

from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ReasoningEffort,
    ToolCall,
    ToolDefinition,
)
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.typescript import function_type

DATE = "2025-06-28"
WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "The city."},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["location"],
}


@pytest.fixture(scope="session")
def library(formatter: HarmonyFormatter) -> HarmonyEncoding:
    return formatter.vocabulary._encoding


def _system(effort: str) -> Message:
    content = (
        SystemContent.new()
        .with_conversation_start_date(DATE)
        .with_reasoning_effort(openai_harmony.ReasoningEffort(effort))
    )
    return Message.from_role_and_content(Role.SYSTEM, content)


def _library_ids(library: HarmonyEncoding, messages: list[Message]) -> list[int]:
    return library.render_conversation_for_completion(
        openai_harmony.Conversation.from_messages(messages),
        Role.ASSISTANT,
        RenderConversationConfig(auto_drop_analysis=False),
    )


def test_a_plain_conversation(library: HarmonyEncoding, formatter: HarmonyFormatter) -> None:
    ours = Conversation(
        messages=(
            ChatMessage(MessageRole.SYSTEM, "Answer in verse.\n"),
            ChatMessage(MessageRole.USER, "Привет <|end|> 👋🏽", name="bob"),
            ChatMessage(MessageRole.ASSISTANT, "Hello."),
            ChatMessage(MessageRole.USER, "Again?"),
        ),
        reasoning_effort=ReasoningEffort.HIGH,
    )
    theirs = [
        _system("High"),
        Message.from_role_and_content(
            Role.DEVELOPER, DeveloperContent.new().with_instructions("Answer in verse.\n")
        ),
        Message.from_author_and_content(Author.new(Role.USER, "bob"), "Привет <|end|> 👋🏽"),
        Message.from_role_and_content(Role.ASSISTANT, "Hello.").with_channel("final"),
        Message.from_role_and_content(Role.USER, "Again?"),
    ]
    assert formatter.render(ours).token_ids == _library_ids(library, theirs)


def test_a_tool_loop(library: HarmonyEncoding, formatter: HarmonyFormatter) -> None:
    tools = (
        ToolDefinition("get_weather", "Get the weather.\nAnywhere.", WEATHER),
        ToolDefinition("web-browsing", None),
    )
    ours = Conversation(
        messages=(
            ChatMessage(MessageRole.DEVELOPER, "Be exact."),
            ChatMessage(MessageRole.USER, "Weather in SF?"),
            ChatMessage(
                MessageRole.ASSISTANT,
                "Let me look.",
                "Need the tool.",
                (
                    ToolCall("a", "get_weather", '{"location": "SF"}'),
                    ToolCall("b", "web-browsing", "{}"),
                ),
            ),
            ChatMessage(MessageRole.TOOL, '{"t": 20}', tool_call_id="a"),
            ChatMessage(MessageRole.TOOL, "none", tool_call_id="b"),
        ),
        tools=tools,
    )
    developer = (
        DeveloperContent.new()
        .with_instructions("Be exact.")
        .with_function_tools(
            [
                ToolDescription.new("get_weather", "Get the weather.\nAnywhere.", parameters=WEATHER),
                ToolDescription.new("web-browsing", ""),
            ]
        )
    )

    def call(name: str, arguments: str) -> Message:
        return (
            Message.from_role_and_content(Role.ASSISTANT, arguments)
            .with_channel("commentary")
            .with_recipient(f"functions.{name}")
            .with_content_type("json")
        )

    def result(name: str, text: str) -> Message:
        return (
            Message.from_author_and_content(Author.new(Role.TOOL, f"functions.{name}"), text)
            .with_channel("commentary")
            .with_recipient("assistant")
        )

    theirs = [
        _system("Medium"),
        Message.from_role_and_content(Role.DEVELOPER, developer),
        Message.from_role_and_content(Role.USER, "Weather in SF?"),
        Message.from_role_and_content(Role.ASSISTANT, "Need the tool.").with_channel("analysis"),
        Message.from_role_and_content(Role.ASSISTANT, "Let me look.").with_channel("commentary"),
        call("get_weather", '{"location": "SF"}'),
        call("web-browsing", "{}"),
        result("get_weather", '{"t": 20}'),
        result("web-browsing", "none"),
    ]
    assert formatter.render(ours).token_ids == _library_ids(library, theirs)


class _Schemas:
    """Random schemas of the forms that openai-harmony renders without losing anything."""

    def __init__(self, seed: int) -> None:
        self._order = random.Random(seed)

    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {name: self._schema(1) for name in ("p", "q")}}

    def _schema(self, depth: int) -> dict[str, Any]:
        order = self._order
        kinds = ["string", "number", "integer", "boolean", "enum"]
        if depth < 4:
            kinds += ["object", "array", "oneOf", "types"]
        kind = order.choice(kinds)
        schema = getattr(self, f"_{kind}", lambda _: {"type": kind})(depth)
        if order.random() < 0.4:
            # Distinct texts: a first variant with its property's own description loses both.
            schema["description"] = f"text {order.randint(0, 1_000_000)}"
        if order.random() < 0.2:
            schema["title"] = "Title"
        if order.random() < 0.2:
            schema["default"] = order.choice(["a", 1, True, 1.5, [1], {"k": "v"}])
        if order.random() < 0.15 and kind not in ("object", "array", "oneOf"):
            schema["nullable"] = True
        if order.random() < 0.1:
            schema["examples"] = order.choice([["e1", "e2"], []])
        return schema

    def _enum(self, _: int) -> dict[str, Any]:
        return {"type": "string", "enum": self._order.sample(["a", "b c", "d"], self._order.randint(1, 3))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._order.sample(["p", "q_r", "s1", "t"], self._order.randint(0, 3))
        properties = {name: self._schema(depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": names[:1]}

    def _array(self, depth: int) -> dict[str, Any]:
        item = self._schema(depth + 1)
        while "oneOf" in item or "enum" in item or isinstance(item["type"], list) or "nullable" in item:
            item = self._schema(depth + 1)
        return {"type": "array", "items": item}

    def _oneOf(self, depth: int) -> dict[str, Any]:
        return {"oneOf": [self._schema(depth + 1) for _ in range(self._order.randint(1, 3))]}

    def _types(self, _: int) -> dict[str, Any]:
        return {"type": self._order.sample(["string", "number", "boolean", "integer", "null"], 2)}


def test_random_schemas(library: HarmonyEncoding) -> None:
    schemas = _Schemas(7)
    for _ in range(1500):
        parameters = schemas.parameters()
        developer = DeveloperContent.new().with_function_tools(
            [ToolDescription.new("f", "Does it.", parameters=parameters)]
        )
        message = library.decode(library.render(Message.from_role_and_content(Role.DEVELOPER, developer)))
        start, end = message.index("// Does it."), message.index("\n\n} // namespace functions")
        assert function_type("f", "Does it.", parameters) == message[start:end], parameters
