"""The chat endpoint as an unmodified OpenAI client sees it."""

from __future__ import annotations

import json

import openai
import pytest

from antiphon.router.byte_format import ARGUMENTS, CONTENT, REASONING, TOOL, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway

USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def answering(*parts: tuple[int, str]) -> ScriptedGateway:
    return ScriptedGateway(lambda _: byte_answer(*parts))


async def sse(deployment, **fields):
    response = await deployment.chat(stream=True, **fields)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_sdk_reads_a_whole_answer(deploy):
    deployment = await deploy(answering((REASONING, "think"), (CONTENT, "answer")))
    deployment.workers.cached_tokens = 4
    completion = await deployment.openai.chat.completions.create(model="tiny", messages=USER)
    message = completion.choices[0].message
    assert message.content == "answer"
    assert message.reasoning == message.reasoning_content == "think"
    assert message.refusal is None
    assert message.tool_calls is None
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "tiny"
    assert completion.system_fingerprint == "fp_test"
    usage = completion.usage
    assert usage.prompt_tokens == len(b"user: hi\nassistant: ")
    assert usage.completion_tokens == len("think") + len("answer") + 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == len("think")
    assert usage.prompt_tokens_details.cached_tokens == 4
    # Strict validation against the SDK's own type: nothing required is missing.
    type(completion).model_validate_json((await deployment.chat()).content, strict=False)


async def test_sdk_streams_an_answer(deploy):
    deployment = await deploy(answering((REASONING, "th"), (CONTENT, "a👍b")))
    stream = await deployment.openai.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [c.choices[0].delta.content for c in chunks[1:-1] if c.choices[0].delta.content]
    assert texts == ["a", "👍", "b"]
    reasoning = [c.choices[0].delta.reasoning for c in chunks[1:3]]
    assert reasoning == ["t", "h"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 + 6 + 3
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stream_and_document_say_the_same(deploy):
    deployment = await deploy(
        answering((REASONING, "r"), (CONTENT, "c"), (TOOL, "weather"), (ARGUMENTS, '{"a":1}'))
    )
    chunks = await sse(deployment, tools=[WEATHER])
    document = (await deployment.chat(tools=[WEATHER])).json()
    message = document["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert "".join(d.get("content", "") for d in deltas) == message["content"] == "c"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message["reasoning_content"] == "r"
    assert calls[0] == {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert message["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    ]
    assert arguments == '{"a":1}'
    assert document["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_message_that_only_calls_has_null_content(deploy):
    deployment = await deploy(answering((TOOL, "weather"), (ARGUMENTS, "{}")))
    document = (await deployment.chat(tools=[WEATHER])).json()
    assert document["choices"][0]["message"]["content"] is None


async def test_length(deploy):
    deployment = await deploy(answering((CONTENT, "abcdef")))
    for field in ("max_tokens", "max_completion_tokens"):
        document = (await deployment.chat(**{field: 4})).json()
        assert document["choices"][0]["finish_reason"] == "length"
        assert document["choices"][0]["message"]["content"] == "abc"
        assert document["usage"]["completion_tokens"] == 4


async def test_output_is_cut_at_the_end_of_the_context(deploy):
    deployment = await deploy(answering((CONTENT, "x" * 600)))
    document = (await deployment.chat(max_tokens=100_000)).json()
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7, 100])
async def test_stop_text_across_tokens(deploy, tokens_per_step):
    workers = answering((REASONING, "END is not looked for here"), (CONTENT, "abc END def"))
    workers.tokens_per_step = tokens_per_step
    deployment = await deploy(workers)
    chunks = await sse(deployment, stop=["END", "zzz"])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "abc "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    document = (await deployment.chat(stop="END")).json()
    assert document["choices"][0]["message"]["content"] == "abc "
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == len("END is not looked for here") + len("abc END") + 2
    # The engine is told; it must not decode for nobody.
    assert not workers.workers["d0"].requests


async def test_held_back_text_comes_out_when_no_stop_text_follows(deploy):
    deployment = await deploy(answering((CONTENT, "abc EN")))
    document = (await deployment.chat(stop="END")).json()
    assert document["choices"][0]["message"]["content"] == "abc EN"


async def test_several_choices_differ_in_seed_only(deploy):
    deployment = await deploy(
        ScriptedGateway(lambda request: byte_answer((CONTENT, f"seed {request.sampling.seed}")))
    )
    document = (await deployment.chat(n=3, seed=7)).json()
    assert [c["message"]["content"] for c in document["choices"]] == ["seed 7", "seed 8", "seed 9"]
    assert [c["index"] for c in document["choices"]] == [0, 1, 2]
    answer_tokens = len("seed 7") + 2
    assert document["usage"]["completion_tokens"] == 3 * answer_tokens
    assert document["usage"]["prompt_tokens"] == len(b"user: hi\nassistant: ")
    chunks = await sse(deployment, n=2, seed=7)
    for choice in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == f"seed {7 + choice}"
        assert mine[-1]["finish_reason"] == "stop"


async def test_parameters_reach_the_engine(deploy):
    deployment = await deploy()
    response = await deployment.chat(
        temperature=0,
        top_p=0.5,
        top_k=9,
        min_p=0.1,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 2},
        min_tokens=1,
        ignore_eos=True,
        max_tokens=17,
        priority=3,
        cache_salt="s",
        timeout_s=500,
    )
    assert response.status_code == 200
    sent = deployment.workers.workers["d0"].sent[0]
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.logit_bias == ((5, 2.0),)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (1, 17, True)
    assert sampling.seed == 2**63 - 1
    assert sampling.stop_token_ids == (260,)
    assert (sent.priority, sent.cache_salt) == (3, "s")
    assert 400 < sent.deadline_s <= 500


async def test_a_seed_is_assigned(deploy):
    deployment = await deploy()
    for _ in range(2):
        await deployment.chat()
    seeds = {message.sampling.seed for message in deployment.workers.workers["d0"].sent}
    assert len(seeds) == 2


async def test_logprobs_cover_content_only(deploy):
    deployment = await deploy(answering((REASONING, "rr"), (CONTENT, "a👍")))
    document = (await deployment.chat(logprobs=True, top_logprobs=2)).json()
    entries = document["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[97], [0xF0], [0x9F], [0x91], [0x8D]]
    assert entries[0]["token"] == "a"
    assert entries[0]["logprob"] == -0.5
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-1.0, -2.0]
    chunks = await sse(deployment, logprobs=True)
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in entries]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


async def test_reasoning_can_be_left_out(deploy):
    deployment = await deploy(answering((REASONING, "secret"), (CONTENT, "a")))
    response = await deployment.chat(include_reasoning=False)
    assert "secret" not in response.text
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    assert "secret" not in (await deployment.chat(include_reasoning=False, stream=True)).text


async def test_hosted_tools_are_left_out_and_counted(deploy):
    deployment = await deploy()
    response = await deployment.chat(tools=[{"type": "web_search"}, {"type": "made_up"}, WEATHER])
    assert response.status_code == 200
    prompt = bytes(deployment.workers.workers["d0"].sent[0].prompt_token_ids).decode()
    assert prompt.count('{"tool"') == 1
    assert await deployment.metric("dropped_tools_total", type="web_search") == 1
    assert await deployment.metric("dropped_tools_total", type="other") == 1


async def test_history_of_every_kind_is_rendered(deploy):
    deployment = await deploy()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": [{"type": "text", "text": "D"}]},
        {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "input_text", "text": "U2"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "T"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"role": "user", "content": "Z"},
    ]
    assert (await deployment.chat(messages=messages)).status_code == 200
    prompt = bytes(deployment.workers.workers["d0"].sent[0].prompt_token_ids).decode()
    assert prompt == (
        "system: S\ndeveloper: D\nuser: U1U2\nassistant: \ntool: T\nassistant: A\nuser: Z\nassistant: "
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_so_far_is_in_every_chunk_where_asked_for(deploy, path):
    deployment = await deploy(answering((REASONING, "ab"), (CONTENT, "c👍")))
    body = {"messages": USER} if "chat" in path else {"prompt": "hi", "max_tokens": 50}
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await deployment.http.post(
        path, json={"model": "tiny", "stream": True, "stream_options": options, **body}
    )
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    usages = [json.loads(event)["usage"] for event in events]
    so_far = [usage["completion_tokens"] for usage in usages]
    assert so_far == sorted(so_far)
    assert so_far[-1] == len(byte_answer((REASONING, "ab"), (CONTENT, "c👍")))
    assert len(set(so_far)) > 4
    for usage in usages:
        assert usage["prompt_tokens"] == usages[-1]["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    alone = await deployment.http.post(
        path,
        json={"model": "tiny", "stream": True, "stream_options": {"continuous_usage_stats": True}, **body},
    )
    assert alone.status_code == 400
    assert alone.json()["error"]["param"] == "stream_options.continuous_usage_stats"


async def test_models(deploy):
    deployment = await deploy()
    models = (await deployment.openai.models.list()).data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].max_model_len == 512
    assert (await deployment.openai.models.retrieve("tiny")).owned_by == "antiphon"
    with pytest.raises(openai.NotFoundError) as caught:
        await deployment.openai.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_silent_stream_is_kept_alive(deploy):
    workers = answering((CONTENT, "ab"))
    workers.step_s = 0.06
    deployment = await deploy(workers, sse_keep_alive_s=0.02)
    response = await deployment.chat(stream=True)
    assert response.text.startswith(": keep-alive\n\n") or ": keep-alive\n\n" in response.text
    assert response.text.index('"role":"assistant"') < response.text.index('"content":"a"')
    stream = await deployment.openai.chat.completions.create(model="tiny", messages=USER, stream=True)
    texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(text or "" for text in texts) == "ab"
