"""The model that ships with the project answers right through the whole service: router, prefill, decode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from antiphon.cluster.deployment import deploy
from antiphon.cluster.resolution import resolve_deployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.demo.shape import MODEL_NAME

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # a crowded machine starts processes slowly
    pytest.mark.asyncio(loop_scope="module"),
]

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city"}},
        "required": ["location"],
    },
}
PARCEL = {
    "name": "find_parcel",
    "description": "Returns the parcel of a customer.",
    "parameters": {
        "type": "object",
        "properties": {"customer": {"type": "string", "description": "The customer"}},
        "required": ["customer"],
    },
}


@dataclass(frozen=True)
class Reply:
    """One greedy answer, whole or put together from what was streamed."""

    finish: str | None
    reasoning: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    message: dict[str, Any]


class Chat:
    """Asks the served model through OpenAI's SDK."""

    def __init__(self, sdk: openai.AsyncOpenAI) -> None:
        self.sdk = sdk

    async def ask(self, *turns: str | dict[str, Any], stream: bool = False, **fields: Any) -> Reply:
        """The reply to a conversation; plain texts are the user's."""
        messages = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
        request: dict[str, Any] = {"model": MODEL_NAME, "messages": messages, "temperature": 0, **fields}
        if not stream:
            completion = await self.sdk.chat.completions.create(**request)
            choice = completion.choices[0]
            return self._reply(choice.finish_reason, choice.message)
        async with self.sdk.chat.completions.stream(**request) as events:
            async for _ in events:
                pass
            choice = (await events.get_final_completion()).choices[0]
        return self._reply(choice.finish_reason, choice.message)

    def _reply(self, finish: str | None, message: Any) -> Reply:
        calls = tuple((c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ())
        reasoning = getattr(message, "reasoning", None) or ""
        given = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        for call in given.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        return Reply(finish, reasoning, message.content or "", calls, given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat(
    local_deployment: DeploymentConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Chat]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        model = local_deployment.model.model_copy(update={"path": MODEL_NAME, "served_name": None})
        resolved = resolve_deployment(local_deployment.model_copy(update={"model": model}))
    assert Path(resolved.config.model.path).is_relative_to(tmp_path_factory.getbasetemp())
    async with deploy(resolved) as running:
        await running.wait_ready()
        base_url = f"{running.urls[0]}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as sdk:
            yield Chat(sdk)


async def in_both_ways(asked: Callable[[bool], Awaitable[None]]) -> None:
    """Whole and streamed at the same time: requests that decode together share its steps."""

    async def in_one(stream: bool) -> None:
        try:
            await asked(stream)
        except BaseException as error:
            error.add_note("streamed" if stream else "whole")
            raise

    await asyncio.gather(in_one(False), in_one(True))


async def test_facts(chat: Chat) -> None:
    expected = {
        "What is the capital of France?": "Paris",
        "What is the symbol of gold?": "Au",
        "Which country is Nairobi the capital of?": "Kenya",
        "How many seconds are in a minute?": "60",
        "Which planet is closest to the sun?": "Mercury",
    }

    async def asked(stream: bool) -> None:
        replies = await asyncio.gather(*(chat.ask(question, stream=stream) for question in expected))
        for answer, reply in zip(expected.values(), replies, strict=True):
            assert reply.finish == "stop"
            assert answer in reply.content.rstrip(".").split()
            assert reply.reasoning

    await in_both_ways(asked)


async def test_sums_are_worked_out_in_the_reasoning(chat: Chat) -> None:
    async def asked(stream: bool) -> None:
        first, second = await asyncio.gather(
            chat.ask("What is 47 + 38?", stream=stream), chat.ask("What is 83 - 27?", stream=stream)
        )
        assert first.content == "47 + 38 = 85"
        assert "7+8=15, keep 5 carry 1" in first.reasoning
        assert second.content == "83 - 27 = 56"
        assert "borrow 1" in second.reasoning

    await in_both_ways(asked)


async def test_a_conversation_is_followed(chat: Chat) -> None:
    async def asked(stream: bool) -> None:
        first = await chat.ask("What is the capital of Japan?", stream=stream)
        assert "Tokyo" in first.content
        turns = ("What is the capital of Japan?", first.message)
        second = await chat.ask(*turns, "And its currency?", stream=stream)
        assert "Japanese Yen" in second.content
        third = await chat.ask(*turns, "And its currency?", second.message, "And of Egypt?", stream=stream)
        assert "Egyptian Pound" in third.content

    await in_both_ways(asked)


@pytest.mark.parametrize(
    ("question", "call", "result", "answer"),
    [
        (
            "What is the weather in Oslo?",
            ("get_weather", {"location": "Oslo"}),
            {"temperature": 4, "condition": "cloudy"},
            ("Oslo", "4", "cloudy"),
        ),
        (
            "What is the parcel of Alice Brown?",
            ("find_parcel", {"customer": "Alice Brown"}),
            {"parcel": 731},
            ("Alice Brown", "731"),
        ),
    ],
    ids=["known", "unknown"],
)
async def test_a_function_is_called_and_its_result_told(
    chat: Chat,
    question: str,
    call: tuple[str, dict[str, Any]],
    result: dict[str, Any],
    answer: tuple[str, ...],
) -> None:
    tools = [{"type": "function", "function": function} for function in (PARCEL, WEATHER)]

    async def asked(stream: bool) -> None:
        calling = await chat.ask(question, tools=tools, stream=stream)
        assert calling.finish == "tool_calls"
        assert calling.calls == (call,)
        told = {
            "role": "tool",
            "tool_call_id": calling.message["tool_calls"][0]["id"],
            "content": json.dumps(result),
        }
        reply = await chat.ask(question, calling.message, told, tools=tools, stream=stream)
        assert reply.finish == "stop"
        assert not reply.calls
        for part in answer:
            assert part in reply.content

    await in_both_ways(asked)


async def test_no_function_is_called_where_none_fits(chat: Chat) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    reply = await chat.ask("What is the capital of France?", tools=tools)
    assert (reply.finish, reply.calls) == ("stop", ())
    assert "Paris" in reply.content


async def test_the_effort_sets_the_length_of_the_thought(chat: Chat) -> None:
    low, medium, high = await asyncio.gather(
        *(
            chat.ask("What is the capital of Japan?", reasoning_effort=effort)
            for effort in ("low", "medium", "high")
        )
    )
    assert len(low.reasoning) < len(medium.reasoning) < len(high.reasoning)
    for reply in (low, medium, high):
        assert "Tokyo" in reply.content


async def test_what_it_was_not_taught_is_not_made_up(chat: Chat) -> None:
    questions = ("Why is the sky blue?", "Who wrote Hamlet?", "What is the capital of Atlantis?")
    for reply in await asyncio.gather(*(chat.ask(question) for question in questions)):
        assert reply.finish == "stop"
        assert "don't know" in reply.content


async def test_words_are_repeated_reversed_and_counted(chat: Chat) -> None:
    repeated, reversed_, counted = await asyncio.gather(
        chat.ask("Repeat: the quick brown fox"),
        chat.ask("Reverse these words: apple river stone"),
        chat.ask("How many words are in: red green blue"),
    )
    assert repeated.content == "the quick brown fox"
    assert reversed_.content == "stone river apple"
    assert "3 words" in counted.content


async def test_it_says_what_it_is(chat: Chat) -> None:
    hello, who = await asyncio.gather(chat.ask("Hello!"), chat.ask("Who are you?"))
    assert "Hello" in hello.content
    assert MODEL_NAME in who.content


async def test_the_responses_api_answers_the_same(chat: Chat) -> None:
    response = await chat.sdk.responses.create(
        model=MODEL_NAME, input="What is the capital of France?", temperature=0
    )
    assert response.output_text == "The capital of France is Paris."
    again = await chat.sdk.responses.create(
        model=MODEL_NAME, input="And its currency?", previous_response_id=response.id, temperature=0
    )
    assert "Euro" in again.output_text
