"""Calls of custom tools in an answer: from the arguments that the model writes to the input they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon.router.conversation import ToolDefinition
from antiphon.router.formatter import ChatDelta, ToolCallArgumentsDelta, ToolCallStart
from antiphon.router.openai.custom_tools import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_OPENING_LETTERS = f'{{"{INPUT}":"'
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4})'
)
_BEGUN_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?"
)
"""What may still become an escape, or a longer one: a code point beyond the first plane has two halves."""


@dataclass(frozen=True, slots=True)
class CustomCallStart:
    """A call of a custom tool begins; as ``ToolCallStart``, with which it shares its count."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class CustomInputDelta:
    """More input of call ``index``, which has started."""

    index: int
    text: str


ShownDelta = ChatDelta | CustomCallStart | CustomInputDelta


class CustomCalls:
    """Rewrites the deltas of one answer; calls of ordinary functions pass through."""

    def __init__(self, tools: Iterable[ToolDefinition]) -> None:
        self._packed = {tool.name: tool.lark is None for tool in tools if tool.custom}
        self._unpacking: InputUnpacker | None = None
        self._plain = False

    def rewrite(self, deltas: Sequence[ChatDelta]) -> Sequence[ShownDelta]:
        """The same deltas, with calls of custom tools as what they are."""
        if not self._packed:
            return deltas
        return [shown for delta in deltas if (shown := self._rewritten(delta)) is not None]

    def _rewritten(self, delta: ChatDelta) -> ShownDelta | None:
        match delta:
            case ToolCallStart(index, name, call_id):
                packed = self._packed.get(name)
                self._unpacking = InputUnpacker() if packed else None
                self._plain = packed is False
                return delta if packed is None else CustomCallStart(index, name, call_id)
            case ToolCallArgumentsDelta(index, text) if self._plain:
                return CustomInputDelta(index, text)
            case ToolCallArgumentsDelta(index, text) if self._unpacking is not None:
                unpacked = self._unpacking.feed(text)
                return CustomInputDelta(index, unpacked) if unpacked else None
        return delta


class InputUnpacker:
    """The text in ``{"input": "..."}``, as it comes.

    What does not begin like that is no packed input, and is passed on as it is: it is what the model meant.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._ended = False
        self._verbatim = False

    def feed(self, text: str) -> str:
        """More of the JSON; the text that it completes."""
        if self._ended:
            return ""
        self._held += text
        if not (self._inside or self._verbatim):
            self._open()
        if self._verbatim:
            verbatim, self._held = self._held, ""
            return verbatim
        return self._unpack() if self._inside else ""

    def _open(self) -> None:
        opening = _OPENING.match(self._held)
        letters = "".join(self._held.split())
        if opening is not None:
            self._held = self._held[opening.end() :]
            self._inside = True
        elif letters == "{}":
            self._ended = True
        elif not _OPENING_LETTERS.startswith(letters):
            self._verbatim = True

    def _unpack(self) -> str:
        held, position = self._held, 0
        parts: list[str] = []
        while position < len(held):
            if (plain := _PLAIN.match(held, position)) is not None:
                parts.append(plain.group())
                position = plain.end()
            elif held[position] == '"':
                self._ended = True
                position = len(held)
            else:
                if _BEGUN_ESCAPE.fullmatch(held, position) is not None:
                    break  # the rest of it may follow
                escape = _ESCAPE.match(held, position)
                end = position + 1 if escape is None else escape.end()
                parts.append("\\" if escape is None else _character(escape.group()))
                position = end
        self._held = held[position:]
        return "".join(parts)


def _character(escape: str) -> str:
    """What an escape stands for; half of a code point stands for U+FFFD."""
    character: str = json.loads(f'"{escape}"')
    return character.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
