"""``POST /tokenize`` and ``POST /detokenize``: what a prompt is to the model."""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import Field
from starlette.responses import Response

from antiphon.router.formatter import ChatFormatter
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.chat_translate import to_conversation
from antiphon.router.openai.context import ApiContext, check_model
from antiphon.router.openai.errors import invalid
from antiphon.router.openai.prompts import render
from antiphon.router.openai.request_fields import ApiModel, parse_body
from antiphon.router.served_model import ServedModel


class TokenizeTextRequest(ApiModel):
    """Body of ``POST /tokenize`` for a plain text; with ``messages`` it is a chat completion request."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(ApiModel):
    """Body of ``POST /detokenize``."""

    tokens: Annotated[list[int], Field(max_length=1 << 20)]
    model: str | None = None


async def tokenize(context: ApiContext, body: bytes) -> Response:
    """Token ids of a text, or of a conversation as it would be rendered.

    Raises:
        ApiError: the request cannot be served as it is.
    """
    document = await context.encoding.run(len(body), _tokenize, context.model, body)
    return Response(document, media_type="application/json")


async def detokenize(context: ApiContext, body: bytes) -> Response:
    """The text of token ids; markers are shown by their names.

    Raises:
        ApiError: the request cannot be served as it is.
    """
    document = await context.encoding.run(len(body), _detokenize, context.model, body)
    return Response(document, media_type="application/json")


def _tokenize(formatter: ChatFormatter, model: ServedModel, body: bytes) -> bytes:
    if _has_messages(body):
        request = parse_body(ChatCompletionRequest, body)
        check_model(model, request.model)
        token_ids = render(formatter, to_conversation(request)[0]).token_ids
    else:
        text = parse_body(TokenizeTextRequest, body)
        if text.model is not None:
            check_model(model, text.model)
        token_ids = formatter.encode(text.prompt)
    document = {"count": len(token_ids), "max_model_len": model.max_context_tokens, "tokens": token_ids}
    return orjson.dumps(document)


def _detokenize(formatter: ChatFormatter, model: ServedModel, body: bytes) -> bytes:
    request = parse_body(DetokenizeRequest, body)
    if request.model is not None:
        check_model(model, request.model)
    size = formatter.vocabulary_size
    for i, token_id in enumerate(request.tokens):
        if not 0 <= token_id < size:
            raise invalid(f"Token id {token_id} is outside the vocabulary of {size}.", f"tokens[{i}]")
    text = b"".join(map(formatter.token_bytes, request.tokens)).decode("utf-8", "replace")
    return orjson.dumps({"prompt": text})


def _has_messages(body: bytes) -> bool:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(document, dict) and "messages" in document
