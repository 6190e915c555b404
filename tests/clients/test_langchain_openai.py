"""langchain-openai: messages, streams, bound tools and structured output, over both APIs."""

from __future__ import annotations

import pydantic
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MODEL = "gpt-oss-tiny"


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"minus 5 in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(router, request) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=router.url, api_key="none", max_retries=0, use_responses_api=request.param
    )


def test_a_message(model):
    answer = model.invoke("Hi")
    assert answer.text == "Hello 👋 there."
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    assert answer.usage_metadata["total_tokens"] == (
        answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"]
    )


def test_a_stream(model):
    chunks = list(model.stream("Hi"))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        assert isinstance(chunk, AIMessageChunk)
        whole += chunk
    assert whole.text == "Hello 👋 there."


# The library keeps connections of its own, which are bound to the loop that made them.
@pytest.mark.asyncio(loop_scope="module")
async def test_asynchronous(model):
    assert (await model.ainvoke("Hi")).text == "Hello 👋 there."
    assert "".join([chunk.text async for chunk in model.astream("Hi")]) == "Hello 👋 there."


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_loop(model, stream):
    bound = model.bind_tools([get_weather])
    messages = [HumanMessage("Weather in Oslo?")]
    if stream:
        answer, *rest = list(bound.stream(messages))
        for chunk in rest:
            answer += chunk
    else:
        answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = bound.invoke([*messages, answer, result])
    assert final.text == "It is cold in Oslo."


def test_structured_output_by_a_forced_call(model):
    class GetWeather(pydantic.BaseModel):
        """The weather in a city."""

        city: str

    structured = model.with_structured_output(GetWeather, method="function_calling")
    assert structured.invoke("Weather in Oslo?") == GetWeather(city="Oslo")


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output_by_the_form_of_the_answer(model, method):
    class Weather(pydantic.BaseModel):
        """The weather in a city."""

        city: str
        degrees: int
        sky: str

    structured = model.with_structured_output(Weather, method=method)
    expected = Weather(city="Oslo", degrees=-5, sky="clear")
    assert structured.invoke("Weather in Oslo, as JSON?") == expected
    assert list(structured.stream("Weather in Oslo, as JSON?"))[-1] == expected
