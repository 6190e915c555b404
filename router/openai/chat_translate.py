"""From a chat completion request to a conversation."""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.router.conversation import (
    ChatMessage,
    Conversation,
    MessageRole,
    ReasoningEffort,
    ResponseFormat,
    ResponseFormatKind,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from antiphon.router.demands import demands_of
from antiphon.router.json_schemas import UnusableSchema, check_schema
from antiphon.router.openai.chat_schema import (
    HARMLESS_VALUES,
    UNSUPPORTED_FIELDS,
    AllowedToolsParam,
    ChatCompletionRequest,
    ContentPart,
    FunctionParam,
    MessageParam,
    ResponseFormatParam,
    ToolChoiceParam,
)
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.request_fields import refuse_unsupported
from antiphon.router.openai.tool_choice import ALLOWED_TOOLS, allowed_choice, choice_of_mode, named_choice

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

REASONING_EFFORTS = {
    "minimal": ReasoningEffort.LOW,
    "low": ReasoningEffort.LOW,
    "medium": ReasoningEffort.MEDIUM,
    "high": ReasoningEffort.HIGH,
    "xhigh": ReasoningEffort.HIGH,
    "max": ReasoningEffort.HIGH,
}


def to_conversation(request: ChatCompletionRequest) -> tuple[Conversation, list[str]]:
    """The conversation, and the kinds of tools that were left out of it.

    Raises:
        ApiError: 400 that names the field.
    """
    refuse_unsupported(((name, getattr(request, name)) for name in UNSUPPORTED_FIELDS), HARMLESS_VALUES)
    request.check_stream_options(running_usage=True)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if not request.messages:
        raise invalid("'messages' must hold at least one message.", "messages")
    tools, dropped = _tools(request)
    conversation = Conversation(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=reasoning_effort(request.reasoning_effort, "reasoning_effort"),
        response_format=_response_format(request.response_format),
    )
    check_schemas(
        conversation,
        "response_format.json_schema.schema",
        {
            tool.function.name: f"tools[{i}].function.parameters"
            for i, tool in enumerate(request.tools or ())
            if tool.function is not None
        },
    )
    return conversation, dropped


def reasoning_effort(name: str | None, param: str) -> ReasoningEffort | None:
    """The effort that the model knows for one of OpenAI's names.

    Raises:
        ApiError: 400 for ``none`` and for no effort at all.
    """
    if name is None:
        return None
    if name != "none" and name not in REASONING_EFFORTS:
        known = ", ".join(REASONING_EFFORTS)
        raise invalid(f"'{param}' must be one of {known}.", param, "unsupported_value")
    if name == "none":
        raise invalid("This model always reasons; the least effort is 'low'.", param, "unsupported_value")
    return REASONING_EFFORTS[name]


def _message(message: MessageParam, path: str) -> ChatMessage:
    role = MessageRole(message.role)
    if message.content is None and role is not MessageRole.ASSISTANT:
        raise invalid(f"'{path}.content' is missing.", f"{path}.content", "missing_required_parameter")
    if role is MessageRole.TOOL and not message.tool_call_id:
        raise invalid(
            f"'{path}.tool_call_id' is missing.", f"{path}.tool_call_id", "missing_required_parameter"
        )
    if message.tool_calls and role is not MessageRole.ASSISTANT:
        raise invalid(f"A {role} message cannot call tools.", f"{path}.tool_calls")
    text = content_text(message.content, f"{path}.content")
    return ChatMessage(
        role=role,
        text=text or message.refusal or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id if role is MessageRole.TOOL else None,
        name=message.name,
    )


def content_text(content: str | list[ContentPart] | None, path: str) -> str:
    """The text of a message's content; parts are put one after the other.

    Raises:
        ApiError: 400 that names the part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type in TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in TEXT_PARTS or part.type == "refusal":
            raise invalid(f"'{path}[{i}]' has no text.", f"{path}[{i}]", "missing_required_parameter")
        else:
            raise invalid(
                f"This model reads text only; '{path}[{i}]' is of type '{part.type[:64]}'.",
                f"{path}[{i}].type",
                "unsupported_content",
            )
    return "".join(texts)


def _tools(request: ChatCompletionRequest) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    functions: list[tuple[str, FunctionParam]] = []
    dropped = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            dropped.append(tool.type)
        elif tool.function is None:
            path = f"tools[{i}].function"
            raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
        else:
            functions.append((f"tools[{i}].function.name", tool.function))
    return define_tools(functions), dropped


def define_tools(functions: list[tuple[str, FunctionParam]]) -> tuple[ToolDefinition, ...]:
    """Definitions of functions given with the path of their name.

    Raises:
        ApiError: 400 when two have the same name.
    """
    seen: set[str] = set()
    for path, function in functions:
        if function.name in seen:
            raise invalid(f"There are two functions named '{function.name}'.", path)
        seen.add(function.name)
    return tuple(
        ToolDefinition(f.name, f.description or None, f.parameters, bool(f.strict)) for _, f in functions
    )


def _tool_choice(request: ChatCompletionRequest, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceParam):
        if choice.type == ALLOWED_TOOLS:
            return _allowed(choice.allowed_tools, tools)
        if choice.type != "function" or choice.function is None:
            raise unsupported("tool_choice", f"a choice of type '{choice.type[:64]}' is not available.")
        return named_choice(choice.function.name, tools)
    return choice_of_mode(choice, tools)


def _allowed(given: AllowedToolsParam | None, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    path = f"tool_choice.{ALLOWED_TOOLS}"
    if given is None:
        raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
    chosen = [(one.type, one.function.name if one.function is not None else None) for one in given.tools]
    return allowed_choice(given.mode, chosen, tools, path)


def _response_format(given: ResponseFormatParam | None) -> ResponseFormat:
    if given is None:
        return ResponseFormat()
    kind, described = ResponseFormatKind(given.type), given.json_schema
    if kind is not ResponseFormatKind.JSON_SCHEMA:
        return ResponseFormat(kind)
    if described is None:
        path = "response_format.json_schema"
        raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
    return ResponseFormat(
        kind, described.name, described.description, described.schema_, bool(described.strict)
    )


def check_schemas(conversation: Conversation, format_path: str, parameters_paths: Mapping[str, str]) -> None:
    """See that the answer can be kept to every schema that it must follow.

    Args:
        format_path: of the visible answer's schema in the request. parameters_paths: of each function's.

    Raises:
        ApiError: 400 that names the part of a schema that cannot be followed.
    """
    demands = demands_of(conversation)
    for name, schema in () if demands is None else demands.schemas():
        path = format_path if name is None else parameters_paths[name]
        if name is not None and schema["type"] != "object":
            raise invalid(f"'{path}.type' must be 'object'.", f"{path}.type", "invalid_json_schema")
        try:
            check_schema(schema)
        except UnusableSchema as error:
            where = path + error.path
            raise invalid(
                f"An answer cannot be kept to the schema at '{where[:256]}': {error.reason[:512]}.",
                where[:256],
                "invalid_json_schema",
            ) from None
