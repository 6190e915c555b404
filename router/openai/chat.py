"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid

from starlette.responses import Response

from antiphon.router.conversation import Conversation, ToolChoiceMode
from antiphon.router.formatter import ChatFormatter
from antiphon.router.openai.chat_answer import ChatAnswer
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.chat_translate import to_conversation
from antiphon.router.openai.chat_writer import ChatChoices, ChatDocument, ChatIdentity, ChatStream
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.custom_calls import CustomCalls
from antiphon.router.openai.generation_response import GenerationResponse
from antiphon.router.openai.prompts import read_request, rendered, translation_size
from antiphon.router.openai.sampling import output_budget, sampling_params
from antiphon.router.openai.sent_size import check_sent_size


async def chat_completion(context: ApiContext, body: bytes) -> Response:
    """Read a request and prepare its answer.

    Raises:
        ApiError: the request cannot be served as it is.
    """
    received_at = time.monotonic()
    request = await read_request(context, ChatCompletionRequest, body)
    context.check_model(request.model)
    context.check_room(request.n or 1, request.priority, request.timeout_s, received_at)
    size = translation_size(0, request.followed_schemas())
    conversation, dropped = await context.encoding.run(size, _translate, request, held_bytes=len(body))
    count_dropped_tools(context, dropped)
    prompt = await rendered(context, conversation, "messages", len(body))
    limit = context.model.max_context_tokens
    max_tokens = output_budget(len(prompt.token_ids), request.max_output_tokens(), None, limit, "messages")
    sampling = sampling_params(
        request,
        max_tokens=max_tokens,
        stop_token_ids=prompt.stop_token_ids,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        vocabulary_size=context.formatter.vocabulary_size,
        grammar=prompt.grammar,
    )
    check_sent_size(len(prompt.token_ids) * len(sampling), len(sampling), prompt.grammar)
    stops = request.stop_strings()
    answers = [
        ChatAnswer(
            context.formatter.parser(prompt),
            stops,
            context.formatter.token_bytes,
            forced_call=conversation.tool_choice.mode is ToolChoiceMode.NAMED,
            custom_calls=CustomCalls(conversation.tools),
        )
        for _ in sampling
    ]
    completion_id = f"chatcmpl-{uuid.uuid4().hex}"
    include_reasoning = request.include_reasoning is not False
    choices = ChatChoices(
        answers, len(prompt.token_ids), context.metrics, include_reasoning=include_reasoning
    )
    return GenerationResponse(
        context,
        _writer(context, request, answers, completion_id, choices),
        completion_id,
        [(prompt.token_ids, params) for params in sampling],
        prompt_field="messages",
        received_at=received_at,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
        grammar=prompt.grammar,
        on_timing=choices.counts.take_timing if request.reports_timing() else None,
    )


def _translate(_: ChatFormatter, request: ChatCompletionRequest) -> tuple[Conversation, list[str]]:
    return to_conversation(request)


KNOWN_HOSTED_TOOLS = frozenset(
    {
        "code_interpreter",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "web_search",
        "web_search_preview",
    }
)
"""Labels of the metric; whatever else a client writes counts as ``other``."""


def count_dropped_tools(context: ApiContext, kinds: list[str]) -> None:
    """Count hosted tools that were left out of a prompt."""
    for kind in kinds:
        context.metrics.dropped_tools.labels(kind if kind in KNOWN_HOSTED_TOOLS else "other").inc()


def _writer(
    context: ApiContext,
    request: ChatCompletionRequest,
    answers: list[ChatAnswer],
    completion_id: str,
    choices: ChatChoices,
) -> ChatStream | ChatDocument:
    identity = ChatIdentity(completion_id, int(time.time()), context.model.name, context.model.fingerprint)
    if request.stream:
        return ChatStream(
            identity,
            choices,
            answers,
            include_usage=request.includes_usage(),
            running_usage=request.reports_running_usage(),
        )
    return ChatDocument(
        identity,
        choices,
        answers,
        with_logprobs=bool(request.logprobs),
        include_reasoning=request.include_reasoning is not False,
    )
