"""Custom tools: functions whose one input is a text and not JSON, of any form or of a grammar's.

The model was trained on functions that take JSON. An input of any form, or of a regular expression, is
therefore one string property of a strict function, packed and unpacked here; one that follows a Lark grammar
is written as it is, since the grammar would not survive the escapes of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from antiphon.router.conversation import ToolDefinition
from antiphon.router.json_schemas import UnusableSchema, check_schema
from antiphon.router.openai.errors import ApiError, invalid

INPUT = "input"
"""The property that holds a packed input."""
CUSTOM = "custom"
SYNTAXES = ("lark", "regex")


@dataclass(frozen=True, slots=True)
class CustomFormat:
    """What an input must look like. ``path`` is that of the format in the request; without a definition any
    text will do."""

    path: str
    syntax: str | None = None
    definition: str | None = None


def custom_tool(name: str, description: str | None, form: CustomFormat) -> ToolDefinition:
    """The definition of a custom tool.

    Raises:
        ApiError: 400 for another syntax, and for what is no regular expression.
    """
    if not form.definition:
        return ToolDefinition(name, description, _packing({"type": "string"}), strict=True, custom=True)
    if form.syntax not in SYNTAXES:
        path = f"{form.path}.syntax"
        raise invalid(f"'{path}' must be one of {', '.join(SYNTAXES)}.", path)
    if form.syntax == "regex":
        _check_expression(form.definition, f"{form.path}.definition")
        shown = _with_rule(description, "The input matches the regular expression", form.definition)
        packed = _packing({"type": "string", "pattern": f"^(?:{form.definition})$"})
        return ToolDefinition(name, shown, packed, strict=True, custom=True)
    shown = _with_rule(description, "The input is plain text, not JSON, by the Lark grammar", form.definition)
    return ToolDefinition(name, shown, {"type": "string"}, strict=True, custom=True, lark=form.definition)


def arguments_of(text: str, name: str, tools: Iterable[ToolDefinition]) -> str:
    """The arguments that the model wrote, or would have, to call a custom tool with this input."""
    is_plain = any(tool.name == name and tool.lark is not None for tool in tools)
    return text if is_plain else json.dumps({INPUT: text}, ensure_ascii=False)


def unusable_grammar(path: str, reason: str) -> ApiError:
    """400: no input can be kept to the grammar at ``path``."""
    return invalid(
        f"No input can be kept to the grammar at '{path}': {reason[:512]}.", path, "invalid_grammar"
    )


def _check_expression(expression: str, path: str) -> None:
    """See that a regular expression is one by itself: what is put around it might close its groups."""
    try:
        check_schema({"type": "string", "pattern": expression})
    except UnusableSchema as error:
        raise unusable_grammar(path, error.reason) from None


def _packing(text: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {
        "type": "object",
        "properties": {INPUT: dict(text)},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _with_rule(description: str | None, rule: str, definition: str) -> str:
    return "\n\n".join(filter(None, (description, f"{rule}:\n{definition}")))
