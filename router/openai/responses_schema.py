"""The body of a Responses request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from antiphon.router.openai.request_fields import (
    MAX_TOP_LOGPROBS,
    Count,
    NestedModel,
    PositiveCount,
    SamplingFields,
)

OUTPUT_LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ReasoningParam(NestedModel):
    """How much to think; there are no summaries, since the chain of thought itself is in the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextParam(NestedModel):
    """Settings of the visible answer."""

    format: JsonValue = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields):
    """Body of ``POST /v1/responses``."""

    input: str | list[dict[str, JsonValue]]
    """A text, or items: messages, reasoning, function calls, their outputs, references to stored items."""
    instructions: str | None = None
    """Goes before everything else; not taken over from the previous response."""
    previous_response_id: str | None = None
    """A stored response whose conversation goes on."""
    store: bool | None = None
    """Keep the response for later requests; yes when absent."""
    max_output_tokens: PositiveCount | None = None
    """Reasoning included; up to the end of the context when absent."""
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningParam | None = None
    text: TextParam | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    """``reasoning.encrypted_content`` and ``message.output_text.logprobs``; others concern hosted tools."""
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is ever cut out of the input: what is too long is refused."""

    # Inform only.
    client_metadata: JsonValue = None
    max_tool_calls: Count | None = None
    metadata: dict[str, JsonValue] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    # Would change the output and cannot be done; harmless values are accepted.
    background: JsonValue = None
    context_management: JsonValue = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    repetition_penalty: JsonValue = None

    def followed_schemas(self) -> list[JsonValue]:
        """The schemas and the grammars that the answer may have to follow."""
        forced = self.tool_choice not in (None, "auto", "none")
        tools = self.tools or ()
        schemas = [tool.get("parameters") for tool in tools if forced or tool.get("strict")]
        schemas += [tool.get("format") for tool in tools]
        return [*schemas, None if self.text is None else self.text.format]


UNSUPPORTED_FIELDS = ("background", "context_management", "conversation", "prompt", "repetition_penalty")
HARMLESS_VALUES: dict[str, JsonValue] = {"background": False, "repetition_penalty": 1.0}
