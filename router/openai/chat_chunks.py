"""The bytes of a chat completion: the chunks of a stream, and the one document."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from antiphon.router.formatter import ContentDelta, ReasoningDelta, ToolCallArgumentsDelta, ToolCallStart
from antiphon.router.openai.chat_answer import AnswerDelta, CollectedCall, CollectedMessage
from antiphon.router.openai.custom_calls import CustomCallStart, CustomInputDelta
from antiphon.router.openai.logprobs import JsonLogprob
from antiphon.router.openai.usage import Usage


class ChatChunks:
    """Frames of one stream. What is equal in all chunks is serialised once."""

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        fingerprint: str,
        *,
        include_usage: bool,
        running_usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._running_usage = running_usage
        envelope = orjson.dumps(
            {
                "id": completion_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
                "system_fingerprint": fingerprint,
            }
        )
        self._head = b"data: " + envelope[:-1]
        # With usage asked for, every chunk carries the key, and the last one its value.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._content_heads: dict[int, bytes] = {}
        self._content_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def _content_head(self, choice: int) -> bytes:
        head = self._content_heads.get(choice)
        if head is None:
            place = b',"choices":[{"index":%d,"delta":{"content":' % choice
            head = self._content_heads[choice] = self._head + place
        return head

    def role(self, choice: int) -> bytes:
        """The first chunk of a choice."""
        return self._chunk(choice, b'{"role":"assistant","content":""}')

    def delta(self, choice: int, shown: AnswerDelta) -> bytes:
        """A chunk with more of the answer. Reasoning goes out under both names that clients look for."""
        delta = shown.delta
        if type(delta) is ContentDelta and not shown.logprobs and self._running_usage is None:
            # What nearly every token of an answer becomes: all but the text is equal from chunk to chunk.
            return b"".join((self._content_head(choice), orjson.dumps(delta.text), self._content_tail))
        match delta:
            case ContentDelta(text):
                return self._chunk(choice, b'{"content":' + orjson.dumps(text) + b"}", shown.logprobs)
            case ReasoningDelta(text):
                encoded = orjson.dumps(text)
                return self._chunk(
                    choice, b'{"reasoning":' + encoded + b',"reasoning_content":' + encoded + b"}"
                )
            case CustomCallStart(index, name, call_id):
                call = {
                    "index": index,
                    "id": call_id,
                    "type": "custom",
                    "custom": {"name": name, "input": ""},
                }
            case CustomInputDelta(index, text):
                call = {"index": index, "custom": {"input": text}}
            case ToolCallStart(index, name, call_id):
                call = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArgumentsDelta(index, text):
                call = {"index": index, "function": {"arguments": text}}
        return self._chunk(choice, orjson.dumps({"tool_calls": [call]}))

    def finish(self, choice: int, reason: str, logprobs: Sequence[JsonLogprob]) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(choice, b"{}", logprobs, orjson.dumps(reason))

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all choices, when the client asked for it."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _chunk(
        self, choice: int, delta: bytes, logprobs: Sequence[JsonLogprob] = (), reason: bytes = b"null"
    ) -> bytes:
        shown_logprobs = orjson.dumps({"content": list(logprobs), "refusal": None}) if logprobs else b"null"
        return b"".join(
            (
                self._head,
                b',"choices":[{"index":',
                str(choice).encode(),
                b',"delta":',
                delta,
                b',"logprobs":',
                shown_logprobs,
                b',"finish_reason":',
                reason,
                b"}",
                self._tail if self._running_usage is None else self._tail_with(self._running_usage()),
            )
        )

    def _tail_with(self, usage: Usage) -> bytes:
        return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


def chat_document(
    completion_id: str,
    created: int,
    model: str,
    fingerprint: str,
    choices: Sequence[tuple[CollectedMessage, str]],
    usage: Usage,
    *,
    with_logprobs: bool,
    include_reasoning: bool,
) -> bytes:
    """The ``chat.completion`` object; ``choices`` are whole messages with their finish reason."""
    return orjson.dumps(
        {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": index,
                    "message": _message(message, include_reasoning=include_reasoning),
                    "logprobs": {"content": message.logprobs, "refusal": None} if with_logprobs else None,
                    "finish_reason": reason,
                }
                for index, (message, reason) in enumerate(choices)
            ],
            "usage": usage,
            "service_tier": "default",
            "system_fingerprint": fingerprint,
        }
    )


def _message(message: CollectedMessage, *, include_reasoning: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "role": "assistant",
        # Null, not empty: there are calls alone, or the answer was cut short before its text began.
        "content": "".join(message.content) or None,
        "refusal": None,
        "annotations": [],
    }
    if include_reasoning:
        reasoning = "".join(message.reasoning) or None
        document["reasoning"] = document["reasoning_content"] = reasoning
    if message.tool_calls:
        document["tool_calls"] = [_call(call) for call in message.tool_calls]
    return document


def _call(call: CollectedCall) -> dict[str, object]:
    text = "".join(call.arguments)
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
