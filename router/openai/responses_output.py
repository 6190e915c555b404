"""The output items of a response, and the events that tell a stream how they grow."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from antiphon.router.formatter import ContentDelta, ReasoningDelta, ToolCallArgumentsDelta, ToolCallStart
from antiphon.router.openai.chat_answer import AnswerDelta
from antiphon.router.openai.custom_calls import CustomCallStart, CustomInputDelta
from antiphon.router.openai.logprobs import JsonLogprob
from antiphon.router.openai.reasoning_capsule import seal

JsonObject = dict[str, JsonValue]
Event = tuple[str, JsonObject]
"""Type and fields of an event, without its sequence number."""


@dataclass(slots=True)
class ReasoningItem:
    """A chain of thought."""

    with_capsule: bool
    id: str = field(default_factory=lambda: f"rs_{uuid.uuid4().hex}")
    texts: list[str] = field(default_factory=list)

    def document(self, status: str) -> JsonObject:
        """The item. Its capsule is made once it is whole."""
        text = "".join(self.texts)
        sealed = seal(text) if self.with_capsule and status != "in_progress" else None
        content: list[JsonValue] = [self._part(text)] if text else []
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": sealed,
            "status": status,
        }

    def opened(self, index: int) -> list[Event]:
        """A content part begins."""
        return [_part_event("response.content_part.added", self.id, index, self._part(""))]

    def delta(self, index: int, shown: AnswerDelta, text: str) -> Event:
        """More text."""
        self.texts.append(text)
        return _text_event("response.reasoning_text.delta", self.id, index, {"delta": text})

    def closed(self, index: int) -> list[Event]:
        """The text is whole."""
        text = "".join(self.texts)
        return [
            _text_event("response.reasoning_text.done", self.id, index, {"text": text}),
            _part_event("response.content_part.done", self.id, index, self._part(text)),
        ]

    def _part(self, text: str) -> JsonObject:
        return {"type": "reasoning_text", "text": text}


@dataclass(slots=True)
class MessageItem:
    """Text for the user."""

    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    texts: list[str] = field(default_factory=list)
    logprobs: list[JsonLogprob] = field(default_factory=list)

    def document(self, status: str) -> JsonObject:
        """The item."""
        text = "".join(self.texts)
        content: list[JsonValue] = [self._part(text, self.logprobs)] if text else []
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def opened(self, index: int) -> list[Event]:
        """A content part begins."""
        return [_part_event("response.content_part.added", self.id, index, self._part("", []))]

    def delta(self, index: int, shown: AnswerDelta, text: str) -> Event:
        """More text."""
        self.texts.append(text)
        self.logprobs.extend(shown.logprobs)
        fields: JsonObject = {"delta": text, "logprobs": _json_logprobs(shown.logprobs)}
        return _text_event("response.output_text.delta", self.id, index, fields)

    def closed(self, index: int) -> list[Event]:
        """The text is whole."""
        text = "".join(self.texts)
        fields: JsonObject = {"text": text, "logprobs": _json_logprobs(self.logprobs)}
        return [
            _text_event("response.output_text.done", self.id, index, fields),
            _part_event("response.content_part.done", self.id, index, self._part(text, self.logprobs)),
        ]

    def _part(self, text: str, logprobs: list[JsonLogprob]) -> JsonObject:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": _json_logprobs(logprobs),
        }


@dataclass(frozen=True, slots=True)
class CallKind:
    """What calls of functions and of custom tools are called in items and events."""

    item_type: str
    id_prefix: str
    field: str
    event: str
    named_at_the_end: bool


FUNCTION_CALL = CallKind("function_call", "fc", "arguments", "function_call_arguments", named_at_the_end=True)
CUSTOM_CALL = CallKind("custom_tool_call", "ctc", "input", "custom_tool_call_input", named_at_the_end=False)


@dataclass(slots=True)
class CallItem:
    """A call of a function or of a custom tool."""

    kind: CallKind
    call_id: str
    name: str
    id: str = field(init=False)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{self.kind.id_prefix}_{uuid.uuid4().hex}"

    def document(self, status: str) -> JsonObject:
        """The item."""
        return {
            "id": self.id,
            "type": self.kind.item_type,
            "call_id": self.call_id,
            "name": self.name,
            self.kind.field: "".join(self.texts),
            "status": status,
        }

    def opened(self, index: int) -> list[Event]:
        """A call has no parts."""
        return []

    def delta(self, index: int, shown: AnswerDelta, text: str) -> Event:
        """More of what the call is given."""
        self.texts.append(text)
        fields: JsonObject = {"item_id": self.id, "output_index": index, "delta": text}
        return f"response.{self.kind.event}.delta", fields

    def closed(self, index: int) -> list[Event]:
        """What the call is given is whole."""
        name: JsonObject = {"name": self.name} if self.kind.named_at_the_end else {}
        fields: JsonObject = {
            "item_id": self.id,
            "output_index": index,
            **name,
            self.kind.field: "".join(self.texts),
        }
        return [(f"response.{self.kind.event}.done", fields)]


OutputItem = ReasoningItem | MessageItem | CallItem


class ResponseOutput:
    """Grows output items from deltas; one item is open at a time."""

    def __init__(self, *, with_capsule: bool) -> None:
        self._with_capsule = with_capsule
        self._items: list[OutputItem] = []
        self._open = False
        self._last_status = "completed"

    def add(self, shown: AnswerDelta) -> list[Event]:
        """The events of one delta."""
        match shown.delta:
            case ReasoningDelta(text):
                events = self._need(ReasoningItem)
            case ContentDelta(text):
                events = self._need(MessageItem)
            case ToolCallStart(_, name, call_id):
                return self._begin(CallItem(FUNCTION_CALL, call_id, name))
            case CustomCallStart(_, name, call_id):
                return self._begin(CallItem(CUSTOM_CALL, call_id, name))
            case ToolCallArgumentsDelta(_, text) | CustomInputDelta(_, text):
                # A call's arguments come right after its start and before anything else.
                events = []
        item = self._items[-1]
        events.append(item.delta(len(self._items) - 1, shown, text))
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """The events that end the output; ``complete`` is False when it was cut short."""
        self._last_status = "completed" if complete or not self._open else "incomplete"
        return self._close(self._last_status)

    def documents(self) -> list[JsonValue]:
        """All items as they are now."""
        last = len(self._items) - 1
        ended = "in_progress" if self._open else self._last_status
        return [item.document(ended if i == last else "completed") for i, item in enumerate(self._items)]

    def _need(self, kind: type[ReasoningItem] | type[MessageItem]) -> list[Event]:
        if self._open and isinstance(self._items[-1], kind):
            return []
        return self._begin(ReasoningItem(self._with_capsule) if kind is ReasoningItem else MessageItem())

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        added: JsonObject = {"output_index": index, "item": item.document("in_progress")}
        return [*events, ("response.output_item.added", added), *item.opened(index)]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        index = len(self._items) - 1
        item = self._items[-1]
        done: JsonObject = {"output_index": index, "item": item.document(status)}
        return [*item.closed(index), ("response.output_item.done", done)]


def _text_event(kind: str, item_id: str, index: int, fields: JsonObject) -> Event:
    return kind, {"item_id": item_id, "output_index": index, "content_index": 0, **fields}


def _part_event(kind: str, item_id: str, index: int, part: JsonObject) -> Event:
    return kind, {"item_id": item_id, "output_index": index, "content_index": 0, "part": part}


def _json_logprobs(logprobs: Sequence[JsonLogprob]) -> list[JsonValue]:
    return [dict(entry) for entry in logprobs]
