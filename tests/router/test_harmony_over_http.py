"""The chat endpoint with the Harmony format, from HTTP to token ids and back."""

from __future__ import annotations

import datetime
import json

import pytest

from antiphon.protocol.grammar import JsonSchema
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
THOUGHT_AND_ANSWER = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"
    "Hello 👍 END never shown<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
    'json<|message|>{"city":"Oslo"}<|call|>'
)


@pytest.fixture(scope="module")
def harmony() -> HarmonyFormatter:
    return HarmonyFormatter(current_date=datetime.date(2025, 6, 28).isoformat)


@pytest.fixture
def answering(harmony):
    return lambda text: ScriptedGateway(lambda _: harmony.vocabulary.encode_marked(text))


async def test_reasoning_and_answer(deploy, harmony, answering):
    deployment = await deploy(answering(THOUGHT_AND_ANSWER), formatter=harmony)
    document = (await deployment.chat(stop="END", max_tokens=200)).json()
    message = document["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Think."
    assert message["content"] == "Hello 👍 "
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(harmony.encode("Think."))
    prompt = deployment.workers.workers["d0"].sent[0].prompt_token_ids
    assert document["usage"]["prompt_tokens"] == len(prompt)
    assert harmony.vocabulary.decode(prompt).endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_call(deploy, answering, harmony, stream):
    deployment = await deploy(answering(CALL), formatter=harmony)
    response = await deployment.chat(tools=[WEATHER], stream=stream)
    assert "<|" not in response.text
    if not stream:
        choice = response.json()["choices"][0]
        call = choice["message"]["tool_calls"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
        assert call["id"]
        return
    chunks = [json.loads(event[6:]) for event in response.text.split("\n\n") if event.startswith("data: {")]
    calls = [
        c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]
    ]
    assert calls[0]["function"]["name"] == "weather"
    assert calls[0]["id"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city":"Oslo"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
        ("required", "tool_calls"),
    ],
)
async def test_forced_call_is_demanded_of_the_decode_worker(deploy, answering, harmony, choice, reason):
    deployment = await deploy(answering(CALL), formatter=harmony)
    document = (await deployment.chat(tools=[WEATHER], tool_choice=choice)).json()
    request = deployment.workers.workers["d0"].sent[0]
    assert harmony.vocabulary.decode(request.prompt_token_ids).endswith("<|end|><|start|>assistant")
    contents = [region.content for region in request.grammar.regions]
    assert [json.loads(c.schema) for c in contents if isinstance(c, JsonSchema)] == [
        WEATHER["function"]["parameters"]
    ]
    assert document["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert document["choices"][0]["finish_reason"] == reason


async def test_logprobs_are_of_the_answer_alone(deploy, answering, harmony):
    deployment = await deploy(
        answering(THOUGHT_AND_ANSWER.replace(" END never shown", "")), formatter=harmony
    )
    document = (await deployment.chat(logprobs=True)).json()
    entries = document["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "Hello 👍"


async def test_orphaned_tool_result_is_the_clients_error(deploy, answering, harmony):
    deployment = await deploy(answering(CALL), formatter=harmony)
    response = await deployment.chat(
        messages=[{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "no", "content": "y"}]
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_call_id"
