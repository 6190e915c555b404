"""Every way in which models have been seen to leave the format, whole and in steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from antiphon.router.harmony.commandline import ParseOptions, parse_output, tool_policy_of

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "parse.jsonl").read_text("utf-8").splitlines()
]
MARKER = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call|endoftext|reserved_\d+)\|>")


def test_case_names_are_unique() -> None:
    names = [case["name"] for case in CASES]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("step", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case: dict[str, Any], step: int | None) -> None:
    request = {
        "tools": case["tools"] or [],
        "tool_choice": case["tool_choice"],
        "parallel_tool_calls": case["parallel_tool_calls"],
    }
    options = ParseOptions(
        tools=tool_policy_of(json.dumps(request)), step_tokens=step, cut_short=case["end"] == "length"
    )
    parsed = parse_output(case["output"], options)
    message = parsed["message"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])
    ]
    assert message["content"] == case["content"]
    assert message["reasoning"] == message["reasoning_content"] == case["reasoning"]
    assert calls == case["calls"]
    assert parsed["finish_reason"] == case["finish_reason"]
    assert sorted(parsed["repairs"]) == case["repairs"]
    shown = "".join(
        [message["content"] or "", message["reasoning"] or "", *(part for c in calls for part in c)]
    )
    assert not MARKER.search(shown)
    assert "assistantfinal" not in shown
    assert "assistantcommentary" not in shown
