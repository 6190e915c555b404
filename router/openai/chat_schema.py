"""The body of a chat completion request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from antiphon.router.openai.request_fields import (
    MAX_TOP_LOGPROBS,
    ApiModel,
    NestedModel,
    PositiveCount,
    SamplingFields,
)


class ContentPart(NestedModel):
    """One part of a message's content; only text parts can be used."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCallParam(NestedModel):
    """The call itself."""

    name: str
    arguments: str


class CustomCallParam(NestedModel):
    """The call of a custom tool."""

    name: str
    input: str


class ToolCallParam(NestedModel):
    """A call that an earlier answer made."""

    id: str
    type: str = "function"
    function: FunctionCallParam | None = None
    custom: CustomCallParam | None = None


class MessageParam(NestedModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    """Chain of thought of an assistant message, as an earlier answer gave it."""
    reasoning_content: str | None = None
    """The same under its other name."""
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None
    function_call: JsonValue = None
    """The older form of a call, which is refused: without it the conversation would be another one."""


class FunctionParam(NestedModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class CustomGrammarParam(NestedModel):
    """The grammar that an input follows."""

    definition: str | None = None
    syntax: str | None = None


class CustomFormatParam(NestedModel):
    """What the input of a custom tool must look like: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammarParam | None = None


class CustomToolParam(NestedModel):
    """A tool whose input is a text."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    format: CustomFormatParam | None = None


class ToolParam(NestedModel):
    """A tool; kinds other than ``function`` and ``custom`` are left out of the prompt and counted."""

    type: str
    function: FunctionParam | None = None
    custom: CustomToolParam | None = None


class NamedFunction(NestedModel):
    """Its name."""

    name: str


class AllowedToolParam(NestedModel):
    """One of the tools that may be called."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedToolsParam(NestedModel):
    """The tools that may be called, and whether one must be; the prompt names all tools all the same."""

    mode: str
    tools: list[AllowedToolParam]


class ToolChoiceParam(NestedModel):
    """Forces one tool (``function`` or ``custom``), or leaves some to choose from (``allowed_tools``)."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedToolsParam | None = None


class JsonSchemaParam(NestedModel):
    """The schema that the answer must satisfy."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormatParam(NestedModel):
    """Form of the visible answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaParam | None = None


class ChatCompletionRequest(SamplingFields, ApiModel):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[MessageParam]
    max_tokens: PositiveCount | None = None
    """Output tokens, reasoning included; older name of ``max_completion_tokens``."""
    max_completion_tokens: PositiveCount | None = None
    """Output tokens, reasoning included; up to the end of the context when absent."""
    tools: list[ToolParam] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """minimal is low, xhigh and max are high; none is refused, since the model always reasons."""
    include_reasoning: bool | None = None
    """False leaves the chain of thought out of the answer; it is generated and counted all the same."""
    response_format: ResponseFormatParam | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # Inform only.
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None

    # Would change the output and cannot be done; harmless values are accepted.
    audio: JsonValue = None
    function_call: JsonValue = None
    functions: JsonValue = None
    modalities: JsonValue = None
    prediction: JsonValue = None
    repetition_penalty: JsonValue = None
    verbosity: JsonValue = None
    web_search_options: JsonValue = None

    def max_output_tokens(self) -> int | None:
        """The limit the client named, if any."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def followed_schemas(self) -> list[JsonValue]:
        """The schemas and the grammars that the answer may have to follow."""
        forced = self.tool_choice not in (None, "auto", "none")
        tools = self.tools or ()
        schemas: list[JsonValue] = [
            tool.function.parameters
            for tool in tools
            if tool.function is not None and (forced or tool.function.strict)
        ]
        formats = [tool.custom.format for tool in tools if tool.custom is not None]
        schemas += [
            form.grammar.definition for form in formats if form is not None and form.grammar is not None
        ]
        if self.response_format is not None and self.response_format.json_schema is not None:
            schemas.append(self.response_format.json_schema.schema_)
        return schemas


UNSUPPORTED_FIELDS = (
    "audio",
    "function_call",
    "functions",
    "modalities",
    "prediction",
    "repetition_penalty",
    "verbosity",
    "web_search_options",
)
HARMLESS_VALUES: dict[str, JsonValue] = {
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "repetition_penalty": 1.0,
    "verbosity": "medium",
}
