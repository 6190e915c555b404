"""What a client is told when a generation did not end well, and OpenAI's finish reasons."""

from __future__ import annotations

from antiphon.router.dispatch.generation import GenerationEnded
from antiphon.router.lifecycle import EndKind
from antiphon.router.openai.errors import (
    ApiError,
    client_left,
    deadline_exceeded,
    invalid,
    rate_limited,
    server_error,
    unavailable,
)

SHUTDOWN_RETRY_AFTER_S = 5.0


def error_of(end: GenerationEnded, prompt_field: str) -> ApiError | None:
    """The error that a generation's end means; None when it ended well.

    ``prompt_field`` is what the request calls its prompt.
    """
    detail = end.detail or str(end.kind)
    match end.kind:
        case EndKind.STOP | EndKind.LENGTH:
            return None
        case EndKind.OVERLOADED:
            return rate_limited(f"The server is busy: {detail}.", end.retry_after_s or 1.0)
        case EndKind.NO_WORKER:
            return unavailable(f"The service is not ready: {detail}.", end.retry_after_s or 5.0)
        case EndKind.SHUTDOWN:
            return unavailable("The server is shutting down.", SHUTDOWN_RETRY_AFTER_S)
        case EndKind.TOO_LARGE:
            return invalid(f"The request does not fit: {detail}.", prompt_field, "context_length_exceeded")
        case EndKind.DEADLINE:
            return deadline_exceeded("The request did not finish before its deadline.")
        case EndKind.GRAMMAR:
            return invalid(f"The answer could not be kept to its form: {detail}.", None, "grammar_failed")
        case EndKind.FAILED:
            return server_error(f"The request could not be completed: {detail}.")
        case EndKind.CLIENT_GONE | EndKind.SLOW_CLIENT:
            return client_left()
