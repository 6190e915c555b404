"""From request fields to what an engine samples with."""

from __future__ import annotations

import secrets

from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import SamplingParams
from antiphon.router.openai.errors import context_length_exceeded, invalid
from antiphon.router.openai.request_fields import SamplingFields

_SEED_SPACE = 1 << 63
SMALLEST_TOP_P = 1e-6
"""``top_p`` 0 means the best token only, which every positive value this small does."""


def output_budget(
    prompt_tokens: int, asked: int | None, default: int | None, max_context_tokens: int, param: str
) -> int:
    """Output tokens that a request may produce: what it asked for, cut at the end of the context.

    Raises:
        ApiError: 400 when the prompt leaves no room at all; ``param`` is the prompt's field.
    """
    room = max_context_tokens - prompt_tokens
    if room < 1:
        raise context_length_exceeded(prompt_tokens, max_context_tokens, param)
    wanted = asked if asked is not None else default
    return room if wanted is None else min(wanted, room)


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    top_logprobs: int | None,
    vocabulary_size: int,
    grammar: GrammarSpec | None = None,
) -> list[SamplingParams]:
    """One set of parameters per choice; they differ in their seed only.

    Raises:
        ApiError: 400 that names the field.
    """
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise invalid(f"'min_tokens' is larger than the {max_tokens} tokens that may follow.", "min_tokens")
    for name in ("ignore_eos", "min_tokens") if grammar is not None else ():
        if getattr(request, name):
            raise invalid(f"'{name}' contradicts the form that the answer must have.", name)
    # A client's seed may be negative, an engine's is not. Without one, chance decides here and only here.
    seed = secrets.randbits(63) if request.seed is None else request.seed % _SEED_SPACE
    top_p = 1.0 if request.top_p is None else max(request.top_p, SMALLEST_TOP_P)
    biases = request.biases(vocabulary_size)
    return [
        SamplingParams(
            max_tokens=max_tokens,
            seed=(seed + choice) % _SEED_SPACE,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=top_p,
            top_k=min(max(request.top_k or 0, 0), vocabulary_size),
            min_p=request.min_p or 0.0,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(request.ignore_eos),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=biases,
            top_logprobs=top_logprobs,
        )
        for choice in range(request.n or 1)
    ]
