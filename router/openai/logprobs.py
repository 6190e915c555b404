"""Log-probabilities in the form of the chat API."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import JsonValue

from antiphon.protocol.messages import TokenLogprobs

JsonLogprob = dict[str, JsonValue]
TokenBytes = Callable[[int], bytes]


def chat_logprob(token_id: int, values: TokenLogprobs, token_bytes: TokenBytes) -> JsonLogprob:
    """One entry of ``logprobs.content``: the token and the best others at its position."""
    entry = _token(token_id, values.chosen, token_bytes)
    entry["top_logprobs"] = [_token(other, value, token_bytes) for other, value in values.top]
    return entry


def _token(token_id: int, logprob: float, token_bytes: TokenBytes) -> JsonLogprob:
    raw = token_bytes(token_id)
    # -inf has no JSON form; OpenAI's documented stand-in for "impossible" is -9999.
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(raw),
    }
