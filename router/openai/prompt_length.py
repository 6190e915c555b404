"""Whether a prompt is far too long, found out before all of it is encoded.

What takes seconds to encode fits into no context, and its first part says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from antiphon.router.conversation import Conversation
from antiphon.router.formatter import ChatFormatter
from antiphon.router.harmony.history import first_kept_reasoning
from antiphon.router.openai.errors import context_length_exceeded

_UNDOUBTED_CHARACTERS_PER_TOKEN = 6
"""A text of fewer than this per token of the context may well fit; it is encoded as a whole, and once."""
_PART_CHARACTERS = 16 * 1024
_CUT_TOKENS = 8
"""By how many tokens a cut may split what would have been one; far fewer than a part has."""


def refuse_hopeless(formatter: ChatFormatter, texts: Iterable[str], limit: int, param: str) -> None:
    """Refuse a prompt whose texts have more tokens than ``limit``, which the context has.

    Raises:
        ApiError: 400 that names ``param``; the tokens that it tells are those that were counted.
    """
    given = list(texts)
    if sum(map(len, given)) <= limit * _UNDOUBTED_CHARACTERS_PER_TOKEN:
        return
    tokens = 0
    for text in given:
        for start in range(0, len(text), _PART_CHARACTERS):
            part = formatter.encode(text[start : start + _PART_CHARACTERS])
            tokens += max(len(part) - _CUT_TOKENS, 0)
            if tokens > limit:
                raise context_length_exceeded(tokens, limit, param, at_least=True)


def conversation_texts(conversation: Conversation) -> Iterator[str]:
    """The texts of a conversation that can be long, without reasoning that the prompt leaves out."""
    reasoning_from = first_kept_reasoning(conversation.messages)
    for index, message in enumerate(conversation.messages):
        yield message.text
        if index >= reasoning_from:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.arguments
    for tool in conversation.offered_tools:
        yield tool.description or ""
