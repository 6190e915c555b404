"""Custom tools over both APIs: what the model is shown, what it may write, and what the client gets."""

from __future__ import annotations

import datetime
import json
from typing import Any

import openai.types.chat
import openai.types.responses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from antiphon.protocol.grammar import JsonSchema, LarkGrammar
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.openai.custom_calls import InputUnpacker
from antiphon.router.served_model import ServedModel

MODEL = ServedModel(name="tiny", max_context_tokens=8192, created=1_700_000_000, fingerprint="fp_test")
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
LARK = 'start: "add " NUMBER "\\n"\nNUMBER: /[0-9]+/\n'
INPUT = 'print("a\\n☃ 👍")\n\tx = {}'
FORMATS: dict[str, Any] = {
    "text": {"type": "text"},
    "regex": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+ [0-9]"},
    "lark": {"type": "grammar", "syntax": "lark", "definition": LARK},
}


def chat_tool(name: str, form: dict[str, Any] | None) -> dict[str, Any]:
    custom: dict[str, Any] = {"name": name, "description": f"Runs {name}."}
    if form is not None and form["type"] == "grammar":
        grammar = {key: form[key] for key in ("syntax", "definition") if key in form}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    elif form is not None:
        custom["format"] = form
    return {"type": "custom", "custom": custom}


def responses_tool(name: str, form: dict[str, Any] | None) -> dict[str, Any]:
    tool = {"type": "custom", "name": name, "description": f"Runs {name}."}
    return tool if form is None else tool | {"format": form}


@pytest.fixture(scope="module")
def harmony() -> HarmonyFormatter:
    return HarmonyFormatter(current_date=datetime.date(2025, 6, 28).isoformat)


def called_with(harmony: HarmonyFormatter, name: str, arguments: str) -> list[int]:
    text = (
        f"<|channel|>analysis<|message|>t<|end|><|start|>assistant to=functions.{name}<|channel|>commentary"
    )
    return harmony.vocabulary.encode_marked(f"{text} json<|message|>{arguments}<|call|>")


@pytest.fixture
def deploy_calling(deploy, harmony):
    async def start(name: str, arguments: str) -> Any:
        answer = called_with(harmony, name, arguments)
        return await deploy(ScriptedGateway(lambda _: answer), MODEL, harmony)

    return start


def arguments_for(kind: str) -> tuple[str, str]:
    """An input, and what the model writes for it."""
    if kind == "lark":
        return "add 42\n", "add 42\n"
    text = "abc 7" if kind == "regex" else INPUT
    return text, json.dumps({"input": text})


@pytest.mark.parametrize("kind", FORMATS)
async def test_chat_calls(deploy_calling, harmony, kind):
    text, written = arguments_for(kind)
    deployment = await deploy_calling("run", written)
    deployment.workers.tokens_per_step = 1
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"tools": [chat_tool("run", FORMATS[kind])]}
    document = (await deployment.http.post("/v1/chat/completions", json=body)).json()
    choice = document["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": text})
    assert choice["finish_reason"] == "tool_calls"
    openai.types.chat.ChatCompletion.model_validate(document)

    streamed = await deployment.http.post("/v1/chat/completions", json=body | {"stream": True})
    chunks = [json.loads(b[6:]) for b in streamed.text.split("\n\n") if b.startswith("data: {")]
    deltas = [c["choices"][0]["delta"].get("tool_calls", [{}])[0] for c in chunks]
    pieces = [delta["custom"] for delta in deltas if "custom" in delta]
    assert pieces[0] == {"name": "run", "input": ""}
    assert all(set(piece) == {"input"} for piece in pieces[1:])
    assert len(pieces) > 2
    assert "".join(piece["input"] for piece in pieces) == text

    # What the next turn shows the model is what it wrote.
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    answered = body | {"messages": [*body["messages"], choice["message"], result]}
    assert (await deployment.http.post("/v1/chat/completions", json=answered)).status_code == 200
    prompt = harmony.vocabulary.decode(deployment.workers.workers["d0"].sent[-1].prompt_token_ids)
    shown = text if kind == "lark" else json.dumps({"input": text}, ensure_ascii=False)
    assert f" to=functions.run<|channel|>commentary json<|message|>{shown}<|call|>" in prompt
    assert "<|start|>functions.run to=assistant<|channel|>commentary<|message|>done<|end|>" in prompt


@pytest.mark.parametrize("kind", FORMATS)
async def test_responses_calls(deploy_calling, harmony, kind):
    text, written = arguments_for(kind)
    deployment = await deploy_calling("run", written)
    deployment.workers.tokens_per_step = 1
    tools = [responses_tool("run", FORMATS[kind])]
    body = {"model": "tiny", "input": "hi", "tools": tools}
    first = (await deployment.http.post("/v1/responses", json=body)).json()
    openai.types.responses.Response.model_validate(first)
    call = first["output"][-1]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "run", text)
    assert first["tools"] == tools

    streamed = await deployment.http.post("/v1/responses", json=body | {"stream": True})
    events = [json.loads(b.split("data: ", 1)[1]) for b in streamed.text.split("\n\n") if b]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        STREAM_EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    last = len(kinds) - 1 - kinds[::-1].index("response.output_item.added")
    assert set(kinds[last + 1 : -3]) == {"response.custom_tool_call_input.delta"}
    assert kinds[-3:] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events[last + 1 : -3]) == events[-3]["input"] == text
    assert len({event["item_id"] for event in events[last + 1 : -2]}) == 1

    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    asking = {"tools": tools, "model": "tiny"}
    prompts = []
    for more in (
        {"previous_response_id": first["id"], "input": [output]},
        {"input": [{"role": "user", "content": "hi"}, *first["output"], output], "store": False},
        {
            "input": [
                {"role": "user", "content": "hi"},
                *({"type": "item_reference", "id": item["id"]} for item in first["output"]),
                output | {"output": [{"type": "input_text", "text": "done"}]},
            ]
        },
    ):
        response = await deployment.http.post("/v1/responses", json=asking | more)
        assert response.status_code == 200, response.text
        prompts.append(deployment.workers.workers["d0"].sent[-1].prompt_token_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    shown = text if kind == "lark" else json.dumps({"input": text}, ensure_ascii=False)
    assert f"<|message|>{shown}<|call|>" in harmony.vocabulary.decode(prompts[0])


async def test_what_the_model_is_shown_and_kept_to(deploy_calling, harmony):
    deployment = await deploy_calling("text", '{"input":"x"}')
    tools = [chat_tool(kind, form) for kind, form in FORMATS.items()]
    tools.append(chat_tool("plain", None))
    tools.append(chat_tool("vague", {"type": "grammar"}))
    assert (await deployment.chat(tools=tools)).status_code == 200
    sent = deployment.workers.workers["d0"].sent[0]
    prompt = harmony.vocabulary.decode(sent.prompt_token_ids)
    for name in ("text", "plain", "vague"):
        assert f"// Runs {name}.\ntype {name} = (_: {{\ninput: string,\n}}) => any;" in prompt
    assert "// [a-z]+ [0-9]\ntype regex = (_: {\ninput: string,\n}) => any;" in prompt
    assert '// start: "add " NUMBER "\\n"\n// NUMBER: /[0-9]+/\ntype lark = (_: string) => any;' in prompt
    contents = [region.content for region in sent.grammar.regions]
    assert [content.grammar for content in contents if isinstance(content, LarkGrammar)] == [LARK]
    inputs = [
        json.loads(content.schema)["properties"]["input"]
        for content in contents
        if isinstance(content, JsonSchema)
    ]
    plain = {"type": "string"}
    assert inputs == [plain, {"type": "string", "pattern": "^(?:[a-z]+ [0-9])$"}, plain, plain]


async def test_beside_functions(deploy_calling, harmony):
    """A demanded custom tool, and an answer that calls a function although there is a custom tool."""
    function = {"type": "function", "function": {"name": "f"}}
    tools = [function, chat_tool("run", None)]
    deployment = await deploy_calling("f", '{"input":"x"}')
    message = (await deployment.chat(tools=tools)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"input":"x"}'}
    for choice in (
        {"type": "custom", "custom": {"name": "run"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]},
        },
    ):
        assert (await deployment.chat(tools=tools, tool_choice=choice)).status_code == 200
        grammar = deployment.workers.workers["d0"].sent[-1].grammar
        assert sum(isinstance(region.content, JsonSchema) for region in grammar.regions) == 1


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "xml"}, "format.type"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "a"}, "format{}.syntax"),
        ({"type": "grammar", "definition": "a"}, "format{}.syntax"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: nothing"}, "format{}.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "{{{"}, "format{}.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "a" <|call|>'}, "format{}.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: <[200012]>"}, "format{}.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}, "format{}.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "("}, "format{}.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "a)|(b"}, "format{}.definition"),
    ],
)
async def test_a_format_that_cannot_be_followed_is_named(deploy, form, param):
    deployment = await deploy()
    function = {"type": "function", "function": {"name": "f"}}
    response = await deployment.chat(tools=[function, chat_tool("run", form)])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"tools[1].custom.{param.format('.grammar')}"
    body = {"model": "tiny", "input": "hi", "tools": [responses_tool("run", form)]}
    response = await deployment.http.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == f"tools[0].{param.format('')}"
    assert (error["code"] == "invalid_grammar") is param.endswith("definition")
    assert not deployment.workers.workers["d0"].sent


async def test_a_call_without_its_half_is_named(deploy):
    deployment = await deploy()
    for call, param in (
        ({"id": "a", "type": "custom"}, "custom"),
        ({"id": "a", "type": "function"}, "function"),
        ({"id": "a", "type": "custom", "custom": {"name": "f"}}, "custom.input"),
    ):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        response = await deployment.chat(messages=messages)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"messages[1].tool_calls[0].{param}"


@given(st.text(max_size=30), st.booleans(), st.sampled_from(["", " ", "\n  "]), st.lists(st.integers(1, 5)))
def test_inputs_are_unpacked_as_they_come(text, escaped, blank, steps):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    packed = f'{blank}{{{blank}"input"{blank}:{blank}{json.dumps(text, ensure_ascii=escaped)}{blank}}}{blank}'
    unpacker, got, position = InputUnpacker(), "", 0
    for step in [*steps, len(packed)]:
        piece = unpacker.feed(packed[position : position + step])
        piece.encode()  # never half a code point
        got += piece
        position += step
    assert got == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("ls -la", "ls -la"),
        ('{"cmd": "ls"}', '{"cmd": "ls"}'),
        ("{}", ""),
        (" { }", ""),
        ("", ""),
        ('{"inp', ""),
        ('{"input": "a', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "\\ud83dx and more text"}', "\ufffdx and more text"),
        ('{"input": "\\ud83dabc"}', "\ufffdabc"),
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "a\\qb and more text"}', "a\\qb and more text"),
        ('{"input": "a"} and more', "a"),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_inputs_that_are_packed_badly(written, text, step):
    unpacker = InputUnpacker()
    assert "".join(unpacker.feed(written[i : i + step]) for i in range(0, len(written), step)) == text
