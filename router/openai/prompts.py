"""Reading requests and making prompts of them, away from the event loop where they are long.

The functions that ``EncodingPool`` runs stand here; they take and return what can be pickled, and token ids
as bytes, since a list of a hundred thousand numbers takes ten times as long to unpack.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import TypeVar

import orjson
from pydantic import JsonValue

from antiphon.router.conversation import Conversation
from antiphon.router.encoding_pool import PARSED_PER_ENCODED
from antiphon.router.formatter import ChatFormatter, InvalidPrompt, RenderedPrompt
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.errors import invalid
from antiphon.router.openai.prompt_length import conversation_texts, refuse_hopeless
from antiphon.router.openai.request_fields import ApiModel, parse_body

_ENCODED_PER_COMPILED = 16
"""So many characters are encoded in the time in which one byte of a schema is compiled."""

Request = TypeVar("Request", bound=ApiModel)


def translation_size(read_bytes: int, schemas: Sequence[JsonValue]) -> int:
    """How long it takes to make a conversation of a request, as the characters that are encoded meanwhile.

    Args:
        read_bytes: of JSON, which are read for it.
        schemas: those, and the grammars, that the answer may have to follow.
    """
    return read_bytes // PARSED_PER_ENCODED + len(orjson.dumps(schemas)) * _ENCODED_PER_COMPILED


async def read_request(context: ApiContext, model: type[Request], body: bytes) -> Request:
    """A request of this form.

    Raises:
        ApiError: 400 that names the first field in the way.
    """
    size = len(body) // PARSED_PER_ENCODED
    return await context.encoding.run(size, _parse, model, body, held_bytes=len(body))


async def rendered(context: ApiContext, conversation: Conversation, param: str, size: int) -> RenderedPrompt:
    """The prompt of a conversation that came in ``size`` bytes of JSON.

    Raises:
        ApiError: 400 when the format cannot hold it, or its texts alone are more than the context: naming
            ``param``.
    """
    size = max(size, sum(map(len, conversation_texts(conversation))))
    limit = context.model.max_context_tokens
    prompt, packed = await context.encoding.run(size, _render_within, conversation, limit, param)
    return dataclasses.replace(prompt, token_ids=_unpacked(packed))


async def encoded(context: ApiContext, texts: Sequence[str], param: str) -> list[list[int]]:
    """Token ids of plain prompts.

    Raises:
        ApiError: 400 when one of them has more tokens than the context.
    """
    limit = context.model.max_context_tokens
    packed = await context.encoding.run(sum(map(len, texts)), _encode_within, tuple(texts), limit, param)
    return [_unpacked(part) for part in packed]


def render(formatter: ChatFormatter, conversation: Conversation) -> RenderedPrompt:
    """The prompt of a conversation, here and now.

    Raises:
        ApiError: 400 when the format cannot hold it.
    """
    try:
        return formatter.render(conversation)
    except InvalidPrompt as error:
        raise invalid(str(error), error.param) from error


def _parse(_: ChatFormatter, model: type[Request], body: bytes) -> Request:
    return parse_body(model, body)


def _render_within(
    formatter: ChatFormatter, conversation: Conversation, limit: int, param: str
) -> tuple[RenderedPrompt, bytes]:
    refuse_hopeless(formatter, conversation_texts(conversation), limit, param)
    prompt = render(formatter, conversation)
    return dataclasses.replace(prompt, token_ids=[]), _packed(prompt.token_ids)


def _encode_within(formatter: ChatFormatter, texts: Sequence[str], limit: int, param: str) -> list[bytes]:
    for text in texts:
        refuse_hopeless(formatter, (text,), limit, param)
    return [_packed(formatter.encode(text)) for text in texts]


def _packed(token_ids: list[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _unpacked(packed: bytes) -> list[int]:
    return array("I", packed).tolist()
