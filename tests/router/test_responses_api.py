"""The Responses API as unmodified clients see it."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from antiphon.router.byte_format import ARGUMENTS, CONTENT, REASONING, TOOL, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.openai.reasoning_capsule import MAX_TEXT_BYTES, seal, unseal

USER_ITEMS = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
ALL_KINDS = ((REASONING, "think"), (CONTENT, "hello"), (TOOL, "weather"), (ARGUMENTS, '{"a":1}'))


def answering(*parts: tuple[int, str]) -> ScriptedGateway:
    return ScriptedGateway(lambda _: byte_answer(*parts))


async def respond(deployment, **fields):
    return await deployment.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})


def events_of(text: str) -> list[dict]:
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            events.append(json.loads(lines["data"]))
            assert lines["event"] == events[-1]["type"]
    return events


def prompt_of(deployment, number: int = -1) -> str:
    return bytes(deployment.workers.workers["d0"].sent[number].prompt_token_ids).decode()


async def test_sdk_reads_a_response(deploy):
    deployment = await deploy(answering(*ALL_KINDS))
    response = await deployment.openai.responses.create(
        model="tiny", input="hi", instructions="Be nice.", tools=[WEATHER], metadata={"k": "v"}
    )
    assert response.status == "completed"
    assert response.output_text == "hello"
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "think")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"a":1}')
    assert call.call_id
    assert call.call_id != call.id
    assert response.usage.output_tokens_details.reasoning_tokens == 5
    assert response.usage.input_tokens == len(prompt_of(deployment))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.metadata == {"k": "v"}
    assert response.instructions == "Be nice."
    assert "Be nice." in prompt_of(deployment)
    type(response).model_validate(response.model_dump())


REQUIRED_KEYS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs",
    "temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "store",
    "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip


async def test_every_key_is_present(deploy):
    deployment = await deploy()
    assert (await respond(deployment)).json().keys() >= REQUIRED_KEYS


async def test_events_come_in_order_and_add_up(deploy):
    deployment = await deploy(answering(*ALL_KINDS))
    events = events_of((await respond(deployment, stream=True, tools=[WEATHER])).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    final = events[-1]["response"]
    assert final["status"] == "completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in final["output"]]
    for kind, whole in (("reasoning_text", "think"), ("output_text", "hello")):
        deltas = [e for e in events if e["type"] == f"response.{kind}.delta"]
        assert "".join(e["delta"] for e in deltas) == whole
        assert next(e for e in events if e["type"] == f"response.{kind}.done")["text"] == whole
    arguments = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(e["delta"] for e in arguments) == '{"a":1}'
    assert {e["item_id"] for e in arguments} == {final["output"][2]["id"]}
    finished = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert (finished["name"], finished["arguments"]) == ("weather", '{"a":1}')


async def test_sdk_streams_a_response(deploy):
    deployment = await deploy(answering(*ALL_KINDS))
    async with deployment.openai.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "hello"


async def test_cut_short(deploy):
    deployment = await deploy(answering((REASONING, "think"), (CONTENT, "hello")))
    document = (await respond(deployment, max_output_tokens=9)).json()
    assert document["status"] == "incomplete"
    assert document["incomplete_details"] == {"reason": "max_output_tokens"}
    assert document["completed_at"] is None
    assert [item["status"] for item in document["output"]] == ["completed", "incomplete"]
    assert document["output"][1]["content"][0]["text"] == "he"
    events = events_of((await respond(deployment, max_output_tokens=9, stream=True)).text)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


async def test_failure_after_the_first_event(deploy, until, pass_time):
    workers = answering((CONTENT, "x" * 100))
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(respond(deployment, stream=True, timeout_s=30.0))
    await until(lambda: workers.workers["d0"].batches > 4)
    workers.step_s = 45.0  # the next token but one would come too late
    pass_time(30.0)
    events = events_of((await answer).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["status"] == "failed"


async def test_a_deadline_that_passes_before_the_first_event(deploy, until, pass_time):
    workers = answering((CONTENT, "x" * 100))
    workers.workers["d0"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(respond(deployment, timeout_s=30.0))
    await until(lambda: workers.workers["d0"].held)
    pass_time(30.0)
    assert (await answer).status_code == 504


async def test_previous_response_goes_on(deploy):
    deployment = await deploy(answering((CONTENT, "one")))
    client = deployment.openai
    first = await client.responses.create(model="tiny", input="A", instructions="Not taken over.")
    second = await client.responses.create(model="tiny", input="B", previous_response_id=first.id)
    third = await client.responses.create(model="tiny", input="C", previous_response_id=second.id)
    assert prompt_of(deployment) == "\n".join(
        ["user: A", "assistant: one", "user: B", "assistant: one", "user: C", "assistant: "]
    )
    assert third.previous_response_id == second.id
    # A branch from the middle sees nothing of what came after.
    await client.responses.create(model="tiny", input="D", previous_response_id=first.id)
    assert prompt_of(deployment) == "user: A\nassistant: one\nuser: D\nassistant: "


async def test_stored_responses_can_be_read_and_deleted(deploy):
    deployment = await deploy()
    created = await deployment.openai.responses.create(model="tiny", input=[{"role": "user", "content": "A"}])
    read = await deployment.openai.responses.retrieve(created.id)
    assert read.model_dump() == created.model_dump()
    items = await deployment.openai.responses.input_items.list(created.id)
    assert items.data[0].content == "A"
    deleted = await deployment.http.delete(f"/v1/responses/{created.id}")
    assert deleted.json() == {"id": created.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await deployment.openai.responses.retrieve(created.id)
    assert (await deployment.http.delete(f"/v1/responses/{created.id}")).status_code == 404


async def test_input_items_come_in_pages_and_in_the_order_asked_for(deploy):
    deployment = await deploy()
    texts = [str(i) for i in range(25)]
    ids = [f"i{i}" for i in range(22)] + ["i1", None, 5]
    given = [{"role": "user", "content": text, "id": one} for text, one in zip(texts, ids, strict=True)]
    created = await deployment.openai.responses.create(model="tiny", input=given)
    items = deployment.openai.responses.input_items
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        for limit in (1, 7, 100):
            got = [one.content async for one in items.list(created.id, order=order, limit=limit)]
            assert got == expected
    page = (await deployment.http.get(f"/v1/responses/{created.id}/input_items")).json()
    assert [one["content"] for one in page["data"]] == texts[:4:-1]
    assert (page["last_id"], page["has_more"]) == ("i5", True)
    assert page["first_id"] == page["data"][0]["id"] == f"item_{created.id}_24"
    for query, param in (
        ("order=up", "order"),
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=%D9%A5", "limit"),
        ("after=no", "after"),
    ):
        response = await deployment.http.get(f"/v1/responses/{created.id}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_nobody_waits_for_events_of_a_kept_response(deploy):
    deployment = await deploy()
    created = (await respond(deployment)).json()
    with pytest.raises(openai.BadRequestError) as caught:
        await deployment.openai.responses.retrieve(created["id"], stream=True)
    assert caught.value.param == "stream"
    assert (await deployment.http.get(f"/v1/responses/{created['id']}?stream=false")).json() == created


async def test_what_is_not_stored_cannot_be_referred_to(deploy):
    deployment = await deploy()
    unstored = (await respond(deployment, store=False)).json()
    assert unstored["store"] is False
    for response_id in (unstored["id"], "resp_x"):
        response = await respond(deployment, previous_response_id=response_id)
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "previous_response_id"
    missing = await respond(deployment, input=[{"type": "item_reference", "id": unstored["output"][0]["id"]}])
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "input[0].id"


async def test_item_references_stand_for_stored_items(deploy):
    deployment = await deploy(answering((REASONING, "r"), (CONTENT, "one")))
    first = (await respond(deployment, input="A")).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    again = [{"role": "user", "content": "A"}, *references, {"role": "user", "content": "B"}]
    assert (await respond(deployment, input=again)).status_code == 200
    assert prompt_of(deployment) == "user: A\nassistant: one\nuser: B\nassistant: "


async def test_items_come_back_as_they_were_given(deploy):
    deployment = await deploy(answering(*ALL_KINDS))
    first = (await respond(deployment, tools=[WEATHER])).json()
    call_id = first["output"][2]["call_id"]
    result = {
        "type": "function_call_output",
        "call_id": call_id,
        "output": [{"type": "input_text", "text": "20"}],
    }
    items = [{"role": "user", "content": "hi"}, *first["output"], result]
    response = await respond(deployment, input=items, tools=[WEATHER])
    assert response.status_code == 200, response.text
    assert prompt_of(deployment).endswith("user: hi\nassistant: hello\ntool: 20\nassistant: ")


async def test_request_of_a_coding_agent(deploy):
    """Tools of kinds that do not exist here, two developer messages, replayed reasoning, hints."""
    deployment = await deploy(answering((CONTENT, "done")))
    response = await respond(
        deployment,
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        parallel_tool_calls=True,
        prompt_cache_key="k",
        client_metadata={"x": "y"},
        tool_choice="auto",
        tools=[
            WEATHER,
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "multi", "tools": []},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D1"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D2"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "R"}],
                "encrypted_content": None,
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "20"},
        ],
    )
    assert response.status_code == 200, response.text
    assert events_of(response.text)[-1]["type"] == "response.completed"
    assert "developer: D1\ndeveloper: D2\nuser: U\n" in prompt_of(deployment)
    for kind in ("web_search", "namespace"):
        assert await deployment.metric("dropped_tools_total", type=kind) == 1


async def test_sealed_reasoning_comes_back(deploy, monkeypatch):
    seen = []
    from antiphon.router.byte_format import ByteFormatter

    original = ByteFormatter.render
    monkeypatch.setattr(ByteFormatter, "render", lambda self, c: seen.append(c) or original(self, c))
    deployment = await deploy(answering((REASONING, "think ü"), (CONTENT, "a")))
    first = (await respond(deployment, store=False, include=["reasoning.encrypted_content"])).json()
    sealed = first["output"][0]["encrypted_content"]
    assert sealed
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "more"},
    ]
    assert (await respond(deployment, input=items)).status_code == 200
    assert seen[-1].messages[1].reasoning == "think ü"
    items[1] = {"type": "reasoning", "summary": [], "content": "as a text"}
    assert (await respond(deployment, input=items)).status_code == 200
    assert seen[-1].messages[1].reasoning == "as a text"
    plain = (await respond(deployment)).json()
    assert plain["output"][0]["encrypted_content"] is None


def test_capsules_of_others_are_no_text():
    assert unseal(seal("")) == ""
    for foreign in ("", "gAAAA", "antiphon1:", "antiphon1:!!", seal("text")[:-4], "antiphon1:AAAA"):
        assert unseal(foreign) is None
    assert unseal(seal("x" * (MAX_TEXT_BYTES + 1))) is None


async def test_logprobs(deploy):
    deployment = await deploy(answering((CONTENT, "ab")))
    document = (await respond(deployment, include=["message.output_text.logprobs"], top_logprobs=1)).json()
    entries = document["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert len(entries[0]["top_logprobs"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [*USER_ITEMS, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[1].call_id",
        ),
        (
            {
                "input": [
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                ]
            },
            "input[0].call_id",
        ),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [*USER_ITEMS, {"type": "item_reference"}]}, "input[1].id"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"input": "x" * 600}, "input"),
        ({"input": "x" * 6000}, "input"),
        ({"max_output_tokens": 2**64}, "max_output_tokens"),
        ({"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"Temperature": 1}, "Temperature"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]},
            "input[0].name",
        ),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "a b", "input": "x"}]},
            "input[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
async def test_bad_requests_name_the_field(deploy, fields, param):
    deployment = await deploy()
    response = await respond(deployment, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


async def test_errors_after_a_long_history_name_the_requests_own_item(deploy):
    deployment = await deploy()
    first = (await respond(deployment)).json()
    response = await respond(
        deployment, previous_response_id=first["id"], input=[{"role": "wizard", "content": "x"}]
    )
    assert response.json()["error"]["param"] == "input[0].role"
    output = {"type": "function_call_output", "call_id": "elsewhere", "output": "x"}
    response = await respond(deployment, previous_response_id=first["id"], input=[*USER_ITEMS, output])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1].call_id")
