"""LiteLLM, as a client of OpenAI and of a hosted engine: chat, streams, tools, responses."""

from __future__ import annotations

import litellm
import pydantic
import pytest

MODEL = "gpt-oss-tiny"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(router, request):
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": router.url,
        "api_key": "none",
        "max_retries": 0,
    }


def test_chat(options):
    completion = litellm.completion(messages=USER, **options)
    message = completion.choices[0].message
    assert message.content == "Hello 👋 there."
    assert message.reasoning_content == "They greet."
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0


def test_stream(options):
    chunks = list(litellm.completion(messages=USER, stream=True, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello 👋 there."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "They greet."
    rebuilt = litellm.stream_chunk_builder(chunks, messages=USER)
    assert rebuilt.choices[0].message.content == "Hello 👋 there."


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_loop(options, stream):
    answer = litellm.completion(messages=USER, tools=[TOOL], stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=USER)
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Oslo"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "minus 5"}
    final = litellm.completion(messages=[*USER, message, result], tools=[TOOL], **options)
    assert final.choices[0].message.content == "It is cold in Oslo."


async def test_asynchronous(options):
    completion = await litellm.acompletion(messages=USER, **options)
    assert completion.choices[0].message.content == "Hello 👋 there."
    texts = []
    async for chunk in await litellm.acompletion(messages=USER, stream=True, **options):
        texts.append(chunk.choices[0].delta.content or "")
    assert "".join(texts) == "Hello 👋 there."


def test_responses(router):
    options = {"model": f"openai/{MODEL}", "api_base": router.url, "api_key": "none"}
    response = litellm.responses(input="Hi", **options)
    texts = [part.text for item in response.output if item.type == "message" for part in item.content]
    assert texts == ["Hello 👋 there."]
    kinds = [event.type for event in litellm.responses(input="Hi", stream=True, **options)]
    assert kinds[-1] == "response.completed"


def test_errors_have_their_classes(options):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=USER, temperature=9, **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=USER, **{**options, "model": "openai/other"})


class Weather(pydantic.BaseModel):
    city: str
    degrees: int
    sky: str


@pytest.mark.parametrize("form", [Weather, {"type": "json_object"}], ids=["type", "json_object"])
def test_structured_output(options, form):
    completion = litellm.completion(messages=USER, response_format=form, **options)
    assert Weather.model_validate_json(completion.choices[0].message.content).city == "Oslo"
