"""Model output of every recorded kind, through every endpoint, whole and in steps: one answer each."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.served_model import ServedModel

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "harmony" / "cases" / "parse.jsonl")
    .read_text("utf-8")
    .splitlines()
]
MODEL = ServedModel(name="tiny", max_context_tokens=8192, created=1_700_000_000, fingerprint="fp_test")
MARKER = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call|endoftext|reserved_\d+)\|>")
FILLER = 0
"""Follows an answer that is to be cut short: the engine had more to say."""


@dataclass
class Seen:
    """An answer as one client put it together."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish: str | None = None


@pytest.fixture(scope="module")
def harmony() -> HarmonyFormatter:
    return HarmonyFormatter(current_date=datetime.date(2025, 6, 28).isoformat)


def of_chat_document(document: dict[str, Any]) -> Seen:
    choice = document["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    # Null and never empty, as the field says that there is a text.
    assert message["content"] != ""
    assert message["reasoning"] != ""
    calls = message.get("tool_calls", [])
    return Seen(
        message["content"] or "",
        message["reasoning"] or "",
        [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        [call["id"] for call in calls],
        choice["finish_reason"],
    )


def of_chat_stream(text: str) -> Seen:
    events = [block[6:] for block in text.split("\n\n") if block]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    seen = Seen()
    for chunk in chunks[1:]:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        assert None not in delta.values()
        seen.content += delta.get("content", "")
        seen.reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(seen.calls):
                assert call["type"] == "function"
                assert call["id"]
                seen.calls.append([call["function"]["name"], ""])
                seen.ids.append(call["id"])
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            seen.calls[call["index"]][1] += call["function"]["arguments"]
        seen.finish = choice["finish_reason"]
        assert seen.finish is None or chunk is chunks[-1]
    return seen


def of_response(document: dict[str, Any]) -> Seen:
    """Several items of one kind are one text: what parts them in a chat message is a newline."""
    seen = Seen()
    texts: dict[str, list[str]] = {"reasoning": [], "message": []}
    for item in document["output"]:
        if item["type"] == "function_call":
            seen.calls.append([item["name"], item["arguments"]])
            seen.ids.append(item["call_id"])
        else:
            texts[item["type"]] += [part["text"] for part in item["content"]]
    seen.content, seen.reasoning = "".join(texts["message"]), "".join(texts["reasoning"])
    if document["status"] == "incomplete":
        assert document["incomplete_details"] == {"reason": "max_output_tokens"}
        seen.finish = "length"
    else:
        assert document["status"] == "completed"
        seen.finish = "tool_calls" if seen.calls else "stop"
    return seen


PARTS = {
    "response.reasoning_text.delta": "reasoning_text",
    "response.output_text.delta": "output_text",
    "response.function_call_arguments.delta": "function_call",
}


def of_response_stream(text: str) -> Seen:
    """The last event's response, after the deltas have been seen to add up to it."""
    events = [json.loads(block.split("data: ", 1)[1]) for block in text.split("\n\n") if block]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    response = events[-1]["response"]
    grown = [""] * len(response["output"])
    for event in events:
        if event["type"] in PARTS:
            assert event["item_id"] == response["output"][event["output_index"]]["id"]
            grown[event["output_index"]] += event["delta"]
    whole = [
        item["arguments"] if item["type"] == "function_call" else "".join(p["text"] for p in item["content"])
        for item in response["output"]
    ]
    assert grown == whole
    return of_response(response)


def tools_of(case: dict[str, Any], *, flat: bool) -> list[dict[str, Any]]:
    functions = [{"name": name, "parameters": {"type": "object"}} for name in case["tools"] or ()]
    if flat:
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


async def test_every_transcript_reads_the_same_everywhere(deploy, harmony):
    answer: list[int] = []
    workers = ScriptedGateway(lambda _: answer)
    deployment = await deploy(workers, MODEL, harmony)
    for case in CASES:
        tokens = harmony.vocabulary.encode_marked(case["output"])
        cut = case["end"] == "length"
        if cut and not tokens:
            continue  # an engine that is asked for no token at all is not asked
        answer[:] = [*tokens, FILLER] if cut else tokens
        shared = {
            "model": "tiny",
            "tool_choice": case["tool_choice"],
            "parallel_tool_calls": case["parallel_tool_calls"],
        }
        chat = shared | {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": tools_of(case, flat=False),
        }
        respond = shared | {"input": "hi", "tools": tools_of(case, flat=True), "store": False}
        if cut:
            chat["max_tokens"] = respond["max_output_tokens"] = len(tokens)
        seen = {}
        for steps in (1, 3, 10_000):
            workers.tokens_per_step = steps
            streamed = await deployment.http.post("/v1/chat/completions", json=chat | {"stream": True})
            seen[f"chat stream, steps of {steps}"] = of_chat_stream(streamed.text)
            events = await deployment.http.post("/v1/responses", json=respond | {"stream": True})
            seen[f"response stream, steps of {steps}"] = of_response_stream(events.text)
            assert not MARKER.search(streamed.text + events.text), case["name"]
        document = (await deployment.http.post("/v1/chat/completions", json=chat)).json()
        seen["chat"] = of_chat_document(document)
        seen["response"] = of_response((await deployment.http.post("/v1/responses", json=respond)).json())
        for how, got in seen.items():
            where = f"{case['name']}, {how}"
            assert got.content == (case["content"] or ""), where
            assert got.reasoning == (case["reasoning"] or ""), where
            assert got.calls == case["calls"], where
            assert got.finish == case["finish_reason"], where
            assert all(got.ids), where
            assert len(set(got.ids)) == len(got.ids), where
        usage = document["usage"]
        assert usage["completion_tokens"] == len(tokens), case["name"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + len(tokens), case["name"]
    assert not deployment.server.open_requests
