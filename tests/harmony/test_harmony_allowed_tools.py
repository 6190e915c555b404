"""A choice of some tools: the prompt names all of them, and calls of the others are not surfaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.router.harmony.commandline import (
    ParseOptions,
    TranscriptError,
    conversation_of,
    parse_output,
    tool_policy_of,
)
from antiphon.router.harmony.formatter import HarmonyFormatter

NAMES = ("get", "get_weather", "delete")


def chat_request(mode: str, *names: str) -> dict[str, Any]:
    chosen = [{"type": "function", "function": {"name": name}} for name in names]
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": name}} for name in NAMES],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}},
    }


def responses_request(mode: str, *names: str) -> dict[str, Any]:
    return {
        "input": "hi",
        "tools": [{"type": "function", "name": name} for name in NAMES],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "web_search"}, *({"type": "function", "name": name} for name in names)],
        },
    }


def call_of(name: str) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{{}}<|call|>"


@pytest.mark.parametrize("request_of", [chat_request, responses_request])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_prompt_does_not_depend_on_the_choice(
    formatter: HarmonyFormatter, request_of: Any, mode: str
) -> None:
    chosen = request_of(mode, "get")
    free = {name: value for name, value in chosen.items() if name != "tool_choice"}
    prompts = [formatter.render(conversation_of(json.dumps(one))) for one in (chosen, free)]
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0].callable_tools == {"get"}
    assert prompts[1].callable_tools is prompts[1].grammar is None


@pytest.mark.parametrize("request_of", [chat_request, responses_request])
def test_what_was_written_against_the_choice_is_reasoning(request_of: Any) -> None:
    policy = tool_policy_of(json.dumps(request_of("auto", "get")))
    parsed = parse_output(call_of("get") + "<|start|>assistant" + call_of("delete"), ParseOptions(policy))
    calls = parsed["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == ["get"]
    assert parsed["message"]["reasoning"] == "{}"
    assert parsed["repairs"] == {"call_not_allowed": 1}


def test_a_named_function_leaves_no_other() -> None:
    request = chat_request("auto") | {"tool_choice": {"type": "function", "function": {"name": "get"}}}
    assert tool_policy_of(json.dumps(request)).allowed == {"get"}
    with pytest.raises(TranscriptError, match="allowed tools"):
        tool_policy_of(json.dumps(chat_request("auto") | {"tool_choice": {"type": "allowed_tools"}}))
