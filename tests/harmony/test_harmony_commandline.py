"""The functions behind the command, and the page that explains what they report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from antiphon.router.harmony.commandline import (
    ParseOptions,
    TranscriptError,
    parse_output,
    render_request,
    tool_policy_of,
)
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.repairs import Repair

CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
RESPONSES_TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ([CHAT_TOOL], ToolPolicy(frozenset({"f"}))),
        ([RESPONSES_TOOL, {"type": "web_search"}], ToolPolicy(frozenset({"f"}))),
        (
            [{"type": "custom", "name": "f"}, {"type": "custom", "custom": {"name": "g"}}],
            ToolPolicy(frozenset({"f", "g"})),
        ),
        (["f", "g"], ToolPolicy(frozenset({"f", "g"}))),
        ([], ToolPolicy(None)),
        ({"tools": [CHAT_TOOL], "tool_choice": "none"}, ToolPolicy(frozenset({"f"}), surface=False)),
        ({"tools": ["f"], "parallel_tool_calls": False}, ToolPolicy(frozenset({"f"}), max_calls=1)),
        ({}, ToolPolicy(None)),
    ],
)
def test_tools_as_requests_have_them(given: object, policy: ToolPolicy) -> None:
    assert tool_policy_of(json.dumps(given)) == policy


@pytest.mark.parametrize(
    "given", ["{", '"f"', "[1]", '[{"type": "function"}]', '[{"type": "function", "function": 1}]']
)
def test_tools_that_cannot_be_read(given: str) -> None:
    with pytest.raises(TranscriptError, match="tool"):
        tool_policy_of(given)


def test_the_message_is_a_chat_message() -> None:
    parsed = parse_output(
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"a":1}<|call|>\n',
        ParseOptions(),
    )
    (call,) = parsed["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert parsed == {
        "message": {
            "role": "assistant",
            "content": None,
            "reasoning": "t",
            "reasoning_content": "t",
            "refusal": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        },
        "finish_reason": "tool_calls",
        "reasoning_tokens": 1,
        "repairs": {},
    }
    assert json.loads(json.dumps(parsed)) == parsed


def test_one_final_newline_is_not_part_of_the_output() -> None:
    assert parse_output("<|channel|>final<|message|>a\n\n", ParseOptions())["message"]["content"] == "a\n"


@pytest.mark.parametrize("date", ["today", "2025-1-1", "2025-01-01\n"])
def test_a_date_that_is_none(date: str) -> None:
    with pytest.raises(TranscriptError, match="date"):
        render_request('{"input": "u"}', current_date=date)


def test_every_repair_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "harmony.md").read_text("utf-8")
    table = page[page.index("## Repairs") :]
    explained = {
        kind
        for row in re.findall(r"^\| (`.*?) \| .* \|$", table, re.MULTILINE)
        for kind in re.findall(r"`(\w+)`", row)
    }
    assert explained - {"kind"} == {repair.value for repair in Repair}
