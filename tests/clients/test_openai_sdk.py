"""The openai SDK, chat and responses, whole, streamed and parsed; every object passes its strict types."""

from __future__ import annotations

from typing import Literal

import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

MODEL = "gpt-oss-tiny"
USER = [{"role": "user", "content": "Hi"}]


class get_weather(pydantic.BaseModel):  # named as the function
    """The weather in a city."""

    city: str


CHAT_TOOL = openai.pydantic_function_tool(get_weather)
RESPONSES_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": get_weather.model_json_schema() | {"additionalProperties": False},
    "strict": True,
}


@pytest.fixture
def client(router):
    with openai.OpenAI(base_url=router.url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client, router):
    completion = client.chat.completions.create(model=MODEL, messages=USER)
    message = completion.choices[0].message
    assert (message.content, message.reasoning) == ("Hello 👋 there.", "They greet.")
    assert router.prompts[0].endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")


def test_chat_objects_are_strictly_typed(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, logprobs=True, n=2)
    assert raw.headers["x-antiphon-workers"] == "d0, p0"
    ChatCompletion.model_validate_json(raw.text, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [CHAT_TOOL]}
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=USER, **options) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        ChatCompletionChunk.model_validate_json(line, strict=True)


def test_chat_stream_adds_up(client):
    with client.chat.completions.stream(
        model=MODEL, messages=USER, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 2
    assert "".join(deltas) == final.choices[0].message.content == "Hello 👋 there."
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens_details.reasoning_tokens > 0


def test_chat_parse_and_the_tool_loop(client, router):
    messages = [{"role": "user", "content": "Weather in Oslo?"}]
    completion = client.chat.completions.parse(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.parsed_arguments == get_weather(city="Oslo")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "minus 5"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    assert answer.choices[0].message.content == "It is cold in Oslo."
    # The loop has not ended: the model sees its own thoughts and the result.
    assert "<|channel|>analysis<|message|>The user wants the weather.<|end|>" in router.prompts[-1]
    assert "functions.get_weather to=assistant<|channel|>commentary<|message|>minus 5" in router.prompts[-1]


def test_chat_stream_of_a_call(client):
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[CHAT_TOOL]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments) for event in done] == [
        ("get_weather", get_weather(city="Oslo"))
    ]


def test_a_named_call_is_forced(client):
    completion = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        tools=[CHAT_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    assert completion.choices[0].message.tool_calls[0].function.arguments == '{"city":"Oslo"}'


class Weather(pydantic.BaseModel):
    city: str
    degrees: int
    sky: Literal["clear", "cloudy"]


OSLO = Weather(city="Oslo", degrees=-5, sky="clear")


def test_chat_parse_into_a_type(client):
    completion = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather)
    assert completion.choices[0].message.parsed == OSLO
    assert completion.choices[0].message.reasoning == "JSON, then."


def test_chat_stream_into_a_type(client):
    with client.chat.completions.stream(model=MODEL, messages=USER, response_format=Weather) as stream:
        events = list(stream)
    assert stream.get_final_completion().choices[0].message.parsed == OSLO
    assert [event.parsed for event in events if event.type == "content.done"] == [OSLO]


def test_responses_parse_into_a_type(client):
    response = client.responses.parse(model=MODEL, input="Weather?", text_format=Weather)
    assert response.output_parsed == OSLO
    assert response.text.format.name == "Weather"


def test_responses_stream_into_a_type(client):
    with client.responses.stream(model=MODEL, input="Weather?", text_format=Weather) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == OSLO
    assert done == [OSLO]


def test_a_json_object(client):
    completion = client.chat.completions.create(
        model=MODEL, messages=USER, response_format={"type": "json_object"}
    )
    assert Weather.model_validate_json(completion.choices[0].message.content) == OSLO


def test_one_of_several_functions_is_required(client):
    other = {"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}
    completion = client.chat.completions.create(
        model=MODEL, messages=USER, tools=[other, CHAT_TOOL], tool_choice="required"
    )
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_a_schema_that_cannot_be_followed(client):
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema.properties.a"


def test_responses(client, router):
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert first.output_text == "Hello 👋 there."
    assert first.output[0].content[0].text == "They greet."
    second = client.responses.create(model=MODEL, input="More", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert "<|channel|>final<|message|>Hello 👋 there.<|end|>" in router.prompts[-1]
    assert "Be brief." in router.prompts[0]
    assert "Be brief." not in router.prompts[-1]
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_objects_are_strictly_typed(client):
    raw = client.responses.with_raw_response.create(model=MODEL, input="Hi", tools=[RESPONSES_TOOL])
    Response.model_validate_json(raw.text, strict=True)
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(
        model=MODEL, input="Hi", tools=[RESPONSES_TOOL], stream=True, include=["reasoning.encrypted_content"]
    ) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
    kinds = [adapter.validate_json(line, strict=True).type for line in lines]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds


def test_responses_stream_and_parse_and_the_tool_loop(client):
    with client.responses.stream(model=MODEL, input="Weather?", tools=[RESPONSES_TOOL]) as stream:
        arguments = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    call = next(item for item in final.output if item.type == "function_call")
    assert "".join(arguments) == call.arguments == '{"city":"Oslo"}'
    # What came back goes in again as the SDK's own objects, and dumped with all their nulls.
    for items in (list(final.output), [item.model_dump() for item in final.output]):
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "minus 5"}
        parsed = client.responses.parse(
            model=MODEL, input=[*USER, *items, output], tools=[RESPONSES_TOOL], store=False
        )
        assert parsed.output_text == "It is cold in Oslo."


def test_completions(client, router):
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="type get_weather", max_tokens=5)
    completion = Completion.model_validate_json(raw.text, strict=True)
    assert completion.choices[0].finish_reason == "length"
    assert router.prompts == ["type get_weather"]


def test_models(client):
    raw = client.models.with_raw_response.retrieve(MODEL)
    assert Model.model_validate_json(raw.text, strict=True).id == MODEL
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_have_their_classes(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=[{"role": "wizard", "content": "x"}])
    assert caught.value.param == "input[0].role"


async def test_the_asynchronous_client(router):
    async with openai.AsyncOpenAI(base_url=router.url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "Hello 👋 there."
        response = await client.responses.create(model=MODEL, input="Hi")
        assert response.output_text == "Hello 👋 there."
