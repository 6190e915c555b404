"""The openai SDK with custom tools and allowed tools: calls, their streams, and results that go back."""

from __future__ import annotations

import openai
import pytest

MODEL = "gpt-oss-tiny"
USER = [{"role": "user", "content": "Run it."}]
PROGRAM = 'print("sung ☃")\n'
"""What the model writes into ``run_python``; see conftest.py."""
CHAT_TOOL = {"type": "custom", "custom": {"name": "run_python", "description": "Runs a program."}}
RESPONSES_TOOL = {"type": "custom", "name": "run_python", "description": "Runs a program."}


def function(name: str) -> dict:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


CHAT_FUNCTIONS = [{"type": "function", "function": function(name)} for name in ("get_weather", "get_time")]
RESPONSES_FUNCTIONS = [{"type": "function", **function(name)} for name in ("get_weather", "get_time")]


@pytest.fixture
def client(router):
    with openai.OpenAI(base_url=router.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_custom_tool_in_chat(client):
    completion = client.chat.completions.create(model=MODEL, messages=USER, tools=[CHAT_TOOL])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "run_python", PROGRAM)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sung"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*USER, choice.message, result], tools=[CHAT_TOOL]
    )
    assert answer.choices[0].message.content == "It ran."


def test_a_streamed_custom_tool_in_chat(client):
    stream = client.chat.completions.create(model=MODEL, messages=USER, tools=[CHAT_TOOL], stream=True)
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    inputs = [delta.model_dump()["custom"]["input"] for delta in deltas]
    assert "".join(text for text in inputs if text) == PROGRAM
    assert len(inputs) > 2


def test_a_custom_tool_in_responses(client):
    with client.responses.stream(model=MODEL, input=USER, tools=[RESPONSES_TOOL]) as stream:
        inputs = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        final = stream.get_final_response()
    call = next(item for item in final.output if item.type == "custom_tool_call")
    assert "".join(inputs) == call.input == PROGRAM
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "sung"}
    for items in (list(final.output), [item.model_dump() for item in final.output]):
        answer = client.responses.create(model=MODEL, input=[*USER, *items, result], tools=[RESPONSES_TOOL])
        assert answer.output_text == "It ran."
    goes_on = client.responses.create(
        model=MODEL, input=[result], previous_response_id=final.id, tools=[RESPONSES_TOOL]
    )
    assert goes_on.output_text == "It ran."


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("allowed", [("get_weather", "get_time"), ("get_weather",)])
def test_allowed_tools(client, router, mode, allowed):
    names = [{"type": "function", "function": {"name": name}} for name in allowed]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    completion = client.chat.completions.create(
        model=MODEL, messages=USER, tools=CHAT_FUNCTIONS, tool_choice=choice
    )
    assert [call.function.name for call in completion.choices[0].message.tool_calls] == ["get_weather"]
    names = [{"type": "function", "name": name} for name in allowed]
    choice = {"type": "allowed_tools", "mode": mode, "tools": names}
    response = client.responses.create(model=MODEL, input=USER, tools=RESPONSES_FUNCTIONS, tool_choice=choice)
    assert [item.name for item in response.output if item.type == "function_call"] == ["get_weather"]
    # All of them stay in the prompt, whose beginning stays the same for caches.
    assert "type get_time" in router.prompts[-1]


def test_a_tool_that_is_not_allowed_is_not_called(client):
    """The script would call ``get_weather``, which the worker does not let it write."""
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    with pytest.raises(openai.InternalServerError, match="decode failed"):
        client.chat.completions.create(model=MODEL, messages=USER, tools=CHAT_FUNCTIONS, tool_choice=choice)
