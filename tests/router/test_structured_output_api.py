"""Structured output and demanded calls over HTTP: what reaches the decode worker, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.protocol.grammar import JsonSchema
from antiphon.protocol.messages import Finish, FinishReason, GenerateRequest
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.json_schemas import check_schema
from antiphon.router.openai import chat_translate
from antiphon.router.served_model import ServedModel

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD = {"type": "object", "properties": {"a": {"not": {}}}}
JSON_ANSWER = '{"a": 1}'
ROOMY = ServedModel(name="tiny", max_context_tokens=1_000_000, created=0, fingerprint="fp")


def schemas_sent(deployment: Any) -> list[Any]:
    grammar = deployment.workers.workers["d0"].sent[0].grammar
    return [json.loads(r.content.schema) for r in grammar.regions if isinstance(r.content, JsonSchema)]


def function(name: str, parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


@pytest.fixture
async def deployment(deploy):
    return await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, JSON_ANSWER))))


@pytest.mark.parametrize(
    ("fields", "schemas"),
    [
        ({"response_format": {"type": "json_object"}}, [{"type": "object"}]),
        ({"response_format": chat_format(SCHEMA)}, [SCHEMA]),
        ({"response_format": chat_format(None)}, [{"type": "object"}]),
        ({"tools": [function("f"), function("g")], "tool_choice": "required"}, [SCHEMA, SCHEMA]),
        (
            {
                "tools": [function("f", None), function("g")],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            [{"type": "object", "properties": {}, "additionalProperties": False}],
        ),
        ({"tools": [function("f", strict=True), function("g", BAD)]}, [SCHEMA]),
        (
            {"tools": [function("f"), function("g", BAD)], "tool_choice": allowed("required", "f")},
            [SCHEMA],
        ),
        (
            {
                "tools": [function("f", strict=True), function("g", BAD)],
                "tool_choice": allowed("auto", "f", "f"),
            },
            [SCHEMA],
        ),
        ({"tools": [function("f", {"properties": {}}, strict=True)]}, [{"type": "object", "properties": {}}]),
    ],
)
async def test_chat_schemas_reach_the_worker(deployment, fields, schemas):
    response = await deployment.chat(**fields)
    assert response.status_code == 200, response.text
    assert schemas_sent(deployment) == schemas


@pytest.mark.parametrize(
    ("fields", "schemas", "shown"),
    [
        ({"text": {"format": {"type": "json_object"}}}, [{"type": "object"}], {"type": "json_object"}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            [SCHEMA],
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True, "description": None},
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "required"},
            [SCHEMA],
            {"type": "text"},
        ),
    ],
)
async def test_response_schemas_reach_the_worker_and_are_shown(deployment, fields, schemas, shown):
    response = await deployment.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    assert response.status_code == 200, response.text
    assert schemas_sent(deployment) == schemas
    assert response.json()["text"]["format"] == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": chat_format(BAD)}, "response_format.json_schema.schema.properties.a"),
        (
            {"tools": [function("f"), function("g", BAD, strict=True)]},
            "tools[1].function.parameters.properties.a",
        ),
        (
            {"tools": [function("f", BAD)], "tool_choice": "required"},
            "tools[0].function.parameters.properties.a",
        ),
        (
            {"tools": [function("f", {"type": "string"}, strict=True)]},
            "tools[0].function.parameters.type",
        ),
    ],
)
async def test_a_schema_that_cannot_be_followed_names_its_part(deployment, fields, param):
    response = await deployment.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_json_schema")
    assert not deployment.workers.workers["d0"].sent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
            "text.format.schema.properties.a",
        ),
        (
            {
                "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": BAD}],
                "tool_choice": {"type": "function", "name": "f"},
            },
            "tools[1].parameters.properties.a",
        ),
    ],
)
async def test_a_responses_schema_that_cannot_be_followed_names_its_part(deployment, fields, param):
    response = await deployment.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        (allowed(7, "f"), "tool_choice.allowed_tools.mode"),
        (allowed("auto", "other"), "tool_choice.allowed_tools.tools[0]"),
        (allowed("required"), "tool_choice.allowed_tools.tools"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "web_search"}]},
            },
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.allowed_tools.tools[0].name",
        ),
    ],
)
async def test_allowed_tools_that_mean_nothing_name_the_field(deployment, choice, param):
    tools = [function("f"), function("g")]
    response = await deployment.chat(tools=tools, tool_choice=choice)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({}, "tool_choice.tools"),
        ({"mode": "none", "tools": []}, "tool_choice.mode"),
        ({"tools": []}, "tool_choice.mode"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "other"}]}, "tool_choice.tools[0]"),
        ({"mode": "required", "tools": []}, "tool_choice.tools"),
        ({"mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice.tools"),
        ({"mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.tools[0].name"),
    ],
)
async def test_allowed_tools_of_a_response_that_mean_nothing_name_the_field(deployment, choice, param):
    body = {
        "model": "tiny",
        "input": "hi",
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "allowed_tools", **choice},
    }
    response = await deployment.http.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def large(size: int) -> dict[str, Any]:
    """A schema of so many bytes."""
    return {"type": "object", "properties": {"x": {"enum": ["y" * size]}}}


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (4000, {"response_format": chat_format(large(4000))}),
        (4000, {"tools": [function("f", large(4000), strict=True)]}),
        (4000, {"tools": [function("f", large(4000))], "tool_choice": "required"}),
        (4000, {"tools": [function("f", large(4000))], "tool_choice": allowed("required", "f")}),
        (100, {"tools": [function("f", large(100), strict=True)]}),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_large_schemas_are_compiled_beside_the_streams(deploy, monkeypatch, api, size, fields):
    """One of 64 KiB takes a tenth of a second, in which the loop would do nothing for anybody."""
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, JSON_ANSWER))), ROOMY)
    on_the_loop = []

    def noted(schema: Any) -> int:
        on_the_loop.append(len(json.dumps(schema)))
        return check_schema(schema)

    monkeypatch.setattr(chat_translate, "check_schema", noted)
    if api == "chat":
        response = await deployment.chat(**fields)
    else:
        body: dict[str, Any] = {"model": "tiny", "input": "hi", **fields}
        body["tools"] = [flat(tool) for tool in fields.get("tools", ())]
        if (form := body.pop("response_format", None)) is not None:
            body["text"] = {"format": {"type": "json_schema", **form["json_schema"]}}
        if isinstance(body.get("tool_choice"), dict):
            body["tool_choice"] = {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [flat(function("f"))],
            }
        response = await deployment.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert len(json.dumps(schemas_sent(deployment))) > size
    assert bool(on_the_loop) is (size < 1000)


async def test_all_schemas_together_are_bounded(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, JSON_ANSWER))), ROOMY)
    tools = [function(f"f{i}", large(60_000), strict=True) for i in range(9)]
    assert (await deployment.chat(tools=tools[:8])).status_code == 200
    for path, body in (
        ("tools[8].function.parameters", {"messages": [{"role": "user", "content": "hi"}], "tools": tools}),
        ("tools[8].parameters", {"input": "hi", "tools": [flat(tool) for tool in tools]}),
    ):
        url = "/v1/responses" if "input" in body else "/v1/chat/completions"
        response = await deployment.http.post(url, json={"model": "tiny", **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (path, "invalid_json_schema")


async def test_nothing_is_demanded_without_a_demand(deployment):
    assert (
        await deployment.chat(tools=[function("f", BAD)], response_format={"type": "text"})
    ).status_code == 200
    assert deployment.workers.workers["d0"].sent[0].grammar is None


async def test_an_answer_that_cannot_be_kept_to_its_form_is_an_error(deployment):
    worker = deployment.workers.workers["d0"]
    worker.ends.append(Finish(FinishReason.GRAMMAR, error="the parser gave up"))
    response = await deployment.chat(response_format={"type": "json_object"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "grammar_failed"
    assert "the parser gave up" in error["message"]
    assert [type(message) for message in worker.sent].count(GenerateRequest) == 1
    assert (await deployment.chat()).status_code == 200
