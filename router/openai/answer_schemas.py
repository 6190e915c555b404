"""What the endpoints answer with, for the OpenAPI document; the answers themselves are written by hand.

Required are the keys that are always there. Further ones are allowed, as clients must expect of this API.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field, JsonValue


class AnswerModel(pydantic.BaseModel):
    """Base of everything that is answered."""

    model_config = pydantic.ConfigDict(extra="allow", use_attribute_docstrings=True)


class PromptTokensDetails(AnswerModel):
    """Of the prompt."""

    cached_tokens: int
    """Prompt tokens that a prefix cache held."""


class CompletionTokensDetails(AnswerModel):
    """Of the output."""

    reasoning_tokens: int
    """Tokens of the chain of thought."""


class UsageAnswer(AnswerModel):
    """Token counts of one request; the prompt counts once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(AnswerModel):
    """The call itself; ``arguments`` is the text that the model wrote."""

    name: str
    arguments: str


class CalledCustomTool(AnswerModel):
    """The call itself; ``input`` is a text of the tool's form."""

    name: str
    input: str


class ToolCallAnswer(AnswerModel):
    """A function, or a custom tool, that the client is to call."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ChatMessageAnswer(AnswerModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    """The chain of thought."""
    reasoning_content: str | None = None
    """The same under its other name."""
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoiceAnswer(AnswerModel):
    """One of ``n`` answers."""

    index: int
    message: ChatMessageAnswer
    logprobs: dict[str, JsonValue] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletionAnswer(AnswerModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceAnswer]
    usage: UsageAnswer
    system_fingerprint: str


class CompletionChoiceAnswer(AnswerModel):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: dict[str, JsonValue] | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(AnswerModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoiceAnswer]
    usage: UsageAnswer


class ResponseAnswer(AnswerModel):
    """A response of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: dict[str, JsonValue] | None
    incomplete_details: dict[str, JsonValue] | None
    instructions: str | None
    model: str
    output: list[dict[str, JsonValue]]
    """Items: reasoning, messages, calls of functions and of custom tools."""
    tools: list[dict[str, JsonValue]]
    parallel_tool_calls: bool
    metadata: dict[str, JsonValue]
    previous_response_id: str | None
    store: bool
    usage: dict[str, JsonValue] | None


class DeletedResponseAnswer(AnswerModel):
    """A response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsAnswer(AnswerModel):
    """The items of a response's request."""

    object: Literal["list"]
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelAnswer(AnswerModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Prompt and output together, in tokens."""


class ModelListAnswer(AnswerModel):
    """All models, which is one."""

    object: Literal["list"]
    data: Annotated[list[ModelAnswer], Field(min_length=1)]


class TokenizeAnswer(AnswerModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(AnswerModel):
    """A text."""

    prompt: str


class HealthAnswer(AnswerModel):
    """The process is alive."""

    status: Literal["ok"]


class ReadyPair(AnswerModel):
    """A prefill and a decode worker that have moved a test page."""

    prefill: str
    decode: str


class ReadyAnswer(AnswerModel):
    """Requests are taken."""

    status: Literal["ready"]
    pairs: list[ReadyPair]
