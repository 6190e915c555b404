"""The body of a text completion request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from antiphon.router.openai.request_fields import PositiveCount, SamplingFields

MAX_LOGPROBS = 5
MAX_PROMPTS = 128


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``: text goes on, without any chat format."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text, token ids, or several of either; each is answered by ``n`` choices."""
    max_tokens: PositiveCount | None = None
    """16 when absent, as in OpenAI's API."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the chosen tokens and of so many others per position."""
    skip_special_tokens: bool | None = None
    """False shows the format's markers as text."""

    # Would change the output and cannot be done; harmless values are accepted.
    best_of: JsonValue = None
    repetition_penalty: JsonValue = None
    suffix: JsonValue = None


UNSUPPORTED_FIELDS = ("best_of", "repetition_penalty", "suffix")
