"""``POST /v1/completions``: text goes on, without any chat format."""

from __future__ import annotations

import time
import uuid

from pydantic import JsonValue
from starlette.responses import Response

from antiphon.protocol.messages import SamplingParams
from antiphon.router.openai.completion_answer import CompletionAnswer
from antiphon.router.openai.completion_schema import MAX_PROMPTS, UNSUPPORTED_FIELDS, CompletionRequest
from antiphon.router.openai.completion_writer import (
    CompletionDocument,
    CompletionIdentity,
    CompletionStream,
    CompletionTotals,
)
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.generation_response import GenerationResponse
from antiphon.router.openai.prompts import encoded, read_request
from antiphon.router.openai.request_fields import MAX_CHOICES, refuse_unsupported
from antiphon.router.openai.sampling import output_budget, sampling_params
from antiphon.router.openai.sent_size import check_sent_size

DEFAULT_MAX_TOKENS = 16


async def text_completion(context: ApiContext, body: bytes) -> Response:
    """Read a request and prepare its answer.

    Raises:
        ApiError: the request cannot be served as it is.
    """
    received_at = time.monotonic()
    request = await read_request(context, CompletionRequest, body)
    context.check_model(request.model)
    context.check_room(request.n or 1, request.priority, request.timeout_s, received_at)
    _check(request)
    prompts = await prompt_token_ids(context, request)
    sequences = [(prompt, sampling) for prompt in prompts for sampling in _sampling(context, request, prompt)]
    if len(sequences) > MAX_CHOICES:
        raise invalid(f"{len(sequences)} choices are asked for; {MAX_CHOICES} are possible.", "n")
    check_sent_size(sum(len(prompt) for prompt, _ in sequences), len(sequences))
    echoes = [
        echo
        for prompt in prompts
        for echo in [_text(context, prompt) if request.echo else ""] * (request.n or 1)
    ]
    answers = [
        CompletionAnswer(
            context.formatter,
            request.stop_strings(),
            sampling.stop_token_ids,
            skip_markers=request.skip_special_tokens is not False,
            text_offset=len(echo),
        )
        for (_, sampling), echo in zip(sequences, echoes, strict=True)
    ]
    identity = _identity(context, request)
    totals = CompletionTotals(answers, sum(map(len, prompts)), request.n or 1)
    writer = (CompletionStream if request.stream else CompletionDocument)(identity, answers, totals, echoes)
    return GenerationResponse(
        context,
        writer,
        identity.completion_id,
        sequences,
        prompt_field="prompt",
        received_at=received_at,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
        on_timing=totals.take_timing if request.reports_timing() else None,
    )


async def prompt_token_ids(context: ApiContext, request: CompletionRequest) -> list[list[int]]:
    """Every prompt as token ids.

    Raises:
        ApiError: 400 for an empty prompt, too many, or an id outside the vocabulary.
    """
    given = request.prompt
    items = [given] if isinstance(given, str) else given
    numbers = [item for item in items if isinstance(item, int)]
    if not numbers and len(items) > MAX_PROMPTS:
        raise invalid(f"{len(items)} prompts are given; {MAX_PROMPTS} are possible.", "prompt")
    texts = iter(await encoded(context, [item for item in items if isinstance(item, str)], "prompt"))
    several = [next(texts) if isinstance(item, str) else item for item in items if not isinstance(item, int)]
    prompts = [numbers] if numbers else several
    if not prompts or not all(prompts):
        raise invalid("The prompt is empty.", "prompt")
    size = context.formatter.vocabulary_size
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < size:
            raise invalid(f"A token id is outside the vocabulary of {size}.", "prompt")
    return prompts


def _check(request: CompletionRequest) -> None:
    harmless: dict[str, JsonValue] = {"repetition_penalty": 1.0, "best_of": request.n or 1}
    refuse_unsupported(((name, getattr(request, name)) for name in UNSUPPORTED_FIELDS), harmless)
    request.check_stream_options(running_usage=True)
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "with 'logprobs': nothing computes log-probabilities of a prompt here.")


def _sampling(context: ApiContext, request: CompletionRequest, prompt: list[int]) -> list[SamplingParams]:
    max_tokens = output_budget(
        len(prompt), request.max_tokens, DEFAULT_MAX_TOKENS, context.model.max_context_tokens, "prompt"
    )
    return sampling_params(
        request,
        max_tokens=max_tokens,
        stop_token_ids=context.formatter.end_of_text_ids,
        top_logprobs=request.logprobs,
        vocabulary_size=context.formatter.vocabulary_size,
    )


def _identity(context: ApiContext, request: CompletionRequest) -> CompletionIdentity:
    return CompletionIdentity(
        completion_id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=context.model.name,
        fingerprint=context.model.fingerprint,
        choices_per_prompt=request.n or 1,
        with_logprobs=request.logprobs is not None,
        include_usage=request.includes_usage(),
        running_usage=request.reports_running_usage(),
    )


def _text(context: ApiContext, token_ids: list[int]) -> str:
    return b"".join(map(context.formatter.token_bytes, token_ids)).decode("utf-8", "replace")
