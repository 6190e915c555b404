"""What of a conversation's past the model is shown again."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.router.conversation import ChatMessage, MessageRole


def is_final(message: ChatMessage) -> bool:
    """Whether this message ended a turn: an assistant's answer without a tool call, even an empty one.

    Reasoning alone is no answer: it was cut short.
    """
    if message.role is not MessageRole.ASSISTANT or message.tool_calls:
        return False
    return bool(message.text) or not message.reasoning


def first_kept_reasoning(messages: Sequence[ChatMessage]) -> int:
    """Index from which on reasoning is shown again; all of it before the last final answer is dropped.

    A turn that ended in an answer no longer needs its chain of thought; one that is still between a tool call
    and its result does, however many turns ended before it.
    """
    for index in range(len(messages) - 1, -1, -1):
        if is_final(messages[index]):
            return index + 1
    return 0
