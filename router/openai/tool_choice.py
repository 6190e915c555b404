"""What ``tool_choice`` asks for, in the words of both APIs: a mode, one function, or a choice of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from antiphon.router.conversation import ToolChoice, ToolChoiceMode, ToolDefinition
from antiphon.router.openai.custom_tools import CUSTOM
from antiphon.router.openai.errors import invalid

ALLOWED_TOOLS = "allowed_tools"
"""``type`` of a choice that leaves some of the tools out without taking them from the prompt."""
_CALLABLE = ("function", CUSTOM)
_MODES = (ToolChoiceMode.AUTO, ToolChoiceMode.REQUIRED)


def choice_of_mode(mode: str | None, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """A tool choice that names no function.

    Raises:
        ApiError: 400 when a call is required and there is nothing to call.
    """
    choice = ToolChoice(ToolChoiceMode(mode or "auto"))
    if choice.mode is ToolChoiceMode.REQUIRED and not tools:
        raise invalid("'tool_choice' requires a call, but there is no function to call.", "tool_choice")
    return choice


def named_choice(name: str, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """A tool choice of one function.

    Raises:
        ApiError: 400 when there is no such function.
    """
    if name not in {tool.name for tool in tools}:
        raise invalid(f"'tool_choice' names '{name[:64]}', which is not among the tools.", "tool_choice")
    return ToolChoice(ToolChoiceMode.NAMED, name)


def allowed_choice(
    mode: str | None,
    chosen: Iterable[tuple[str, str | None]],
    tools: Sequence[ToolDefinition],
    path: str,
) -> ToolChoice:
    """A tool choice of some of the tools.

    Args:
        chosen: type and name of each. One without a name is a hosted tool, which is not here to be called.
        path: of the object that has ``mode`` and ``tools``.

    Raises:
        ApiError: 400 for another mode, a name that is not among the tools, or a required call of nothing.
    """
    if mode not in _MODES:
        raise invalid(f"'{path}.mode' must be auto or required.", f"{path}.mode")
    declared = {tool.name for tool in tools}
    allowed: set[str] = set()
    for i, (kind, name) in enumerate(chosen):
        if name is None and kind in _CALLABLE:
            where = f"{path}.tools[{i}].name"
            raise invalid(f"'{where}' is missing.", where, "missing_required_parameter")
        if name is None or kind not in _CALLABLE:
            continue
        if name not in declared:
            where = f"{path}.tools[{i}]"
            raise invalid(f"'{where}' names '{name[:64]}', which is not among the tools.", where)
        allowed.add(name)
    if mode == ToolChoiceMode.REQUIRED and not allowed:
        raise invalid(f"'{path}' requires a call, but allows no function.", f"{path}.tools")
    return ToolChoice(ToolChoiceMode(mode), allowed=frozenset(allowed))
