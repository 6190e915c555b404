"""``POST /v1/responses``."""

from __future__ import annotations

import time
import uuid

import orjson
from starlette.responses import Response

from antiphon.router.conversation import Conversation
from antiphon.router.formatter import ChatFormatter
from antiphon.router.harmony.responses_input import ResponsesPrompt, check_call_ids, responses_conversation
from antiphon.router.openai.chat import count_dropped_tools
from antiphon.router.openai.chat_answer import ChatAnswer
from antiphon.router.openai.chat_writer import ChatChoices
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.custom_calls import CustomCalls
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.generation_response import GenerationResponse
from antiphon.router.openai.prompts import read_request, rendered, translation_size
from antiphon.router.openai.request_fields import parse_body, refuse_unsupported
from antiphon.router.openai.response_store import JsonObject, StoredResponse
from antiphon.router.openai.responses_document import ResponseFacts
from antiphon.router.openai.responses_history import ResolvedInput, resolve_input
from antiphon.router.openai.responses_output import ResponseOutput
from antiphon.router.openai.responses_schema import (
    ENCRYPTED_REASONING,
    HARMLESS_VALUES,
    OUTPUT_LOGPROBS,
    UNSUPPORTED_FIELDS,
    ResponsesRequest,
)
from antiphon.router.openai.responses_writer import ResponseWriter
from antiphon.router.openai.sampling import output_budget, sampling_params


async def create_response(context: ApiContext, body: bytes) -> Response:
    """Read a request and prepare its answer.

    Raises:
        ApiError: the request cannot be served as it is.
    """
    received_at = time.monotonic()
    request = await read_request(context, ResponsesRequest, body)
    context.check_model(request.model)
    context.check_room(1, request.priority, request.timeout_s, received_at)
    _check(request)
    resolved = await resolve_input(request, context.store)
    conversation = await _conversation(context, request, resolved)
    prompt = await rendered(context, conversation, "input", len(body))
    limit = context.model.max_context_tokens
    max_tokens = output_budget(len(prompt.token_ids), request.max_output_tokens, None, limit, "input")
    sampling = sampling_params(
        request,
        max_tokens=max_tokens,
        stop_token_ids=prompt.stop_token_ids,
        top_logprobs=_top_logprobs(request),
        vocabulary_size=context.formatter.vocabulary_size,
        grammar=prompt.grammar,
    )
    answer = ChatAnswer(
        context.formatter.parser(prompt),
        request.stop_strings(),
        context.formatter.token_bytes,
        custom_calls=CustomCalls(conversation.tools),
    )
    choices = ChatChoices([answer], len(prompt.token_ids), context.metrics, include_reasoning=True)
    response_id = f"resp_{uuid.uuid4().hex}"
    facts = ResponseFacts(response_id, int(time.time()), context.model.name, request, conversation)
    writer = ResponseWriter(
        facts,
        choices,
        ResponseOutput(with_capsule=ENCRYPTED_REASONING in (request.include or ())),
        streams=bool(request.stream),
    )

    async def keep() -> None:
        if request.store is not False:
            await context.store.put(StoredResponse(writer.finished(), resolved.history, resolved.own))

    return GenerationResponse(
        context,
        writer,
        response_id,
        [(prompt.token_ids, sampling[0])],
        prompt_field="input",
        received_at=received_at,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
        grammar=prompt.grammar,
        before_end=keep,
    )


def _check(request: ResponsesRequest) -> None:
    refuse_unsupported(((name, getattr(request, name)) for name in UNSUPPORTED_FIELDS), HARMLESS_VALUES)
    if request.n not in (None, 1):
        raise unsupported("n", "a response has one output.")
    request.check_stream_options(running_usage=False)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "this model has no such setting.")
    if isinstance(request.input, list) and not request.input and request.previous_response_id is None:
        raise invalid("'input' must hold at least one item.", "input")


async def _conversation(
    context: ApiContext, request: ResponsesRequest, resolved: ResolvedInput
) -> Conversation:
    fields: JsonObject = {
        "model": request.model,
        "instructions": request.instructions,
        "tools": [*request.tools] if request.tools is not None else None,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.reasoning.effort} if request.reasoning else None,
        "text": {"format": request.text.format} if request.text else None,
    }
    # The request's own items first and alone, so that an error names their place in the request.
    documents = [orjson.dumps({**fields, "input": items}) for items in ([*resolved.own], resolved.items())]
    held_bytes = sum(map(len, documents))
    size = translation_size(held_bytes, request.followed_schemas())
    conversation, dropped = await context.encoding.run(
        size, _read_items, documents, len(resolved.history), held_bytes=held_bytes
    )
    count_dropped_tools(context, dropped)
    return conversation


def _read_items(
    _: ChatFormatter, documents: list[bytes], history_items: int
) -> tuple[Conversation, list[str]]:
    for document in documents:
        prompt = parse_body(ResponsesPrompt, document)
        conversation, dropped = responses_conversation(prompt)
    check_call_ids(prompt, history_items=history_items)
    return conversation, dropped


def _top_logprobs(request: ResponsesRequest) -> int | None:
    wanted = OUTPUT_LOGPROBS in (request.include or ()) or request.top_logprobs
    return (request.top_logprobs or 0) if wanted else None
