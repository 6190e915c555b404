"""Every error has OpenAI's body, names what is wrong, and leaves the service serving."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai.types import completion_create_params as openai_text
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_responses

from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.completion_schema import CompletionRequest
from antiphon.router.openai.responses_schema import ResponsesRequest

USER = {"role": "user", "content": "hi"}


def calling(name: str) -> list[dict[str, object]]:
    """A conversation in which a function of this name was called."""
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "5"}
    return [USER, {"role": "assistant", "tool_calls": [call]}, result]


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert list(document) == ["error"]
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["message"]
    assert response.headers["x-request-id"].startswith("req_")
    return document["error"]


BAD_REQUESTS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[1].function_call",
    ),
    ({"model": None}, "model"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**70}, "max_completion_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 2**63}, "min_tokens"),
    ({"top_k": 2**63}, "top_k"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"seed": 2**63}, "seed"),
    ({"logit_bias": {"261": 1}}, "logit_bias.261"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"min_tokens": 1000}, "min_tokens"),
    ({"reasoning_effort": "none"}, "reasoning_effort"),
    ({"reasoning_effort": "immense"}, "reasoning_effort"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"verbosity": "low"}, "verbosity"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"no_such_option": 1}, "no_such_option"),
    ({"Temperature": 1}, "Temperature"),
    ({"max-tokens": 1}, "max-tokens"),
    ({"str": 1}, "str"),
    ({"list[str]": 1}, "list[str]"),
    ({"": 1}, ""),
    ({"x" * 3000: 1}, "x" * 64),
    ({"logit_bias": {"-5": "x"}}, "logit_bias.-5"),
    ({"logit_bias": {"Abc": "x"}}, "logit_bias.Abc"),
    ({"stop": {"str": 1}}, "stop.str"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.custom"),
    ({"messages": calling("")}, "messages[1].tool_calls[0].function.name"),
    ({"messages": calling("f to=functions.g")}, "messages[1].tool_calls[0].function.name"),
    ({"messages": calling("f<|channel|>final")}, "messages[1].tool_calls[0].function.name"),
    ({"timeout_s": 0}, "timeout_s"),
]


@pytest.fixture
async def deployment(deploy):
    return await deploy(max_body_bytes=4096)


async def test_bad_requests_name_the_field(deployment):
    for fields, param in BAD_REQUESTS:
        error = error_of(await deployment.chat(**fields), 400)
        assert error["type"] == "invalid_request_error", fields
        assert error["param"] == param, (fields, error)
        assert error["code"], fields
    assert (await deployment.chat()).status_code == 200


async def test_of_several_forms_the_one_that_was_meant_is_described(deployment):
    error = error_of(await deployment.chat(stop=list("abcde")), 400)
    assert "at most 4" in error["message"]
    assert error["code"] == "invalid_value"


async def test_calls_by_names_that_models_make_up_are_read_back(deployment):
    for name in ("web-browsing", "größe", "a/b:c.d", "x" * 200):
        assert (await deployment.chat(messages=calling(name))).status_code == 200, name


async def test_harmless_values_are_accepted(deployment):
    response = await deployment.chat(
        modalities=["text"],
        functions=None,
        repetition_penalty=1.0,
        verbosity="medium",
        response_format={"type": "text"},
        tool_choice="none",
        parallel_tool_calls=False,
        reasoning_effort="minimal",
        store=True,
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="x",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        stop=None,
        temperature=None,
    )
    assert response.status_code == 200, response.text


NOT_SERVED = {"access_programs", "background_options", "image", "moderation"}
"""Fields of the client's requests that ask for what is not here, and are refused by name."""


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (openai_chat.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
        (openai_text.CompletionCreateParamsNonStreaming, CompletionRequest),
        (openai_responses.ResponseCreateParamsNonStreaming, ResponsesRequest),
    ],
)
def test_every_field_that_the_client_may_send_is_known(sent, read):
    assert set(sent.__annotations__) - set(read.model_fields) <= NOT_SERVED


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b'{"model": "\xff"}', b'{"messages": "\\ud800"}'])
async def test_malformed_json(deployment, body):
    response = await deployment.http.post("/v1/chat/completions", content=body)
    assert error_of(response, 400)["code"] in ("invalid_json", "invalid_type")


async def test_numbers_that_nothing_can_hold_are_the_clients_error(deployment):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}
    error = error_of(await deployment.chat(tools=[tool]), 400)
    assert error["code"] == "invalid_json"
    assert "64 bits" in error["message"]
    tool["function"]["parameters"] = {"maximum": 2**64 - 1, "minimum": -(2**63), "title": "9" * 30}
    assert (await deployment.chat(tools=[tool])).status_code == 200
    item = {"role": "user", "content": "x", "weight": -(2**63) - 1}
    response = await deployment.http.post("/v1/responses", json={"model": "tiny", "input": [item]})
    assert error_of(response, 400)["code"] == "invalid_json"
    assert error_of(await deployment.chat(logit_bias={"9" * 3000: 1}), 400)["param"].startswith(
        "logit_bias.9"
    )


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1E+0400", "1" + "0" * 400 + ".0"])
async def test_what_is_no_number_of_json_is_not_read_as_null(deployment, number):
    item = {"role": "user", "content": "NaN, Infinity and 1e999"}
    chat = {"model": "tiny", "messages": [item], "metadata": {"a": 0.125}}
    response = {"model": "tiny", "input": [item], "metadata": {"a": 0.125}}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
        text = json.dumps(body)
        answer = await deployment.http.post(path, content=text.replace("0.125", number))
        assert error_of(answer, 400)["code"] == "invalid_json"
        answer = await deployment.http.post(path, content=text.replace("0.125", "1e-999"))
        assert answer.status_code == 200, answer.text


async def test_a_deadline_that_has_passed_already(deployment):
    response = await deployment.chat(timeout_s=1e-9)
    assert response.status_code in (503, 504)
    assert "-0" not in response.json()["error"]["message"]


async def test_deep_nesting_is_no_crash(deployment):
    body = b'{"model":"tiny","messages":[],"tools":' + b"[" * 1500 + b"]" * 1500 + b"}"
    error_of(await deployment.http.post("/v1/chat/completions", content=body), 400)


async def test_unknown_model(deployment):
    error = error_of(await deployment.chat(model="gpt-7"), 404)
    assert error["code"] == "model_not_found"
    assert "gpt-7" in error["message"]


async def test_unknown_url_and_method(deployment):
    assert error_of(await deployment.http.get("/v1/embeddings"), 404)["code"] == "unknown_url"
    response = await deployment.http.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_prompt_longer_than_the_context(deployment):
    error = error_of(await deployment.chat(messages=[{"role": "user", "content": "x" * 600}]), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "512" in error["message"]


async def test_body_too_large(deployment):
    large = [{"role": "user", "content": "x" * 5000}]
    assert error_of(await deployment.chat(messages=large), 413)["code"] == "request_too_large"

    async def pieces():
        for _ in range(50):
            yield b" " * 100

    chunked = await deployment.http.post("/v1/chat/completions", content=pieces())
    assert error_of(chunked, 413)["code"] == "request_too_large"
    assert (await deployment.chat()).status_code == 200


async def test_no_ready_worker(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: [], prefill=0))
    response = await deployment.chat()
    assert error_of(response, 503)["code"] == "service_unavailable"
    assert int(response.headers["retry-after"]) > 0
    ready = await deployment.http.get("/ready")
    error_of(ready, 503)
    assert (await deployment.http.get("/health")).status_code == 200


async def test_ready_names_the_pairs(deployment):
    ready = await deployment.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["pairs"] == [{"prefill": "p0", "decode": "d0"}]


async def test_a_crash_is_a_500_in_the_same_shape(deployment, monkeypatch):
    def explode(self: object, conversation: object) -> None:
        raise ZeroDivisionError("private detail")

    monkeypatch.setattr("antiphon.router.byte_format.ByteFormatter.render", explode)
    response = await deployment.chat()
    error = error_of(response, 500)
    assert error["type"] == "server_error"
    assert "private" not in response.text
    assert await deployment.metric("request_errors_total", error_type="server_error") == 1


async def test_errors_raise_in_the_sdk(deployment):
    with pytest.raises(openai.BadRequestError) as caught:
        await deployment.openai.chat.completions.create(model="tiny", messages=[])
    assert caught.value.param == "messages"


async def test_the_openapi_document_describes_bodies_and_errors(deployment):
    document = (await deployment.http.get("/openapi.json")).json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert set(schema["required"]) == {"model", "messages"}
    assert {"400", "404", "413", "429", "500", "503", "504"} <= operation["responses"].keys()
    assert "422" not in operation["responses"]
    # Every reference leads somewhere.
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()
