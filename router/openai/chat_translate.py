"""From a chat completion request to a conversation."""

from __future__ import annotations

import re
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
from antiphon.router.json_schemas import MAX_SCHEMAS_BYTES, UnusableSchema, check_schema, lark_problem
from antiphon.router.openai.chat_schema import (
    HARMLESS_VALUES,
    UNSUPPORTED_FIELDS,
    AllowedToolsParam,
    ChatCompletionRequest,
    ContentPart,
    CustomToolParam,
    FunctionParam,
    MessageParam,
    ResponseFormatParam,
    ToolCallParam,
    ToolChoiceParam,
)
from antiphon.router.openai.custom_tools import (
    CUSTOM,
    CustomFormat,
    arguments_of,
    custom_tool,
    unusable_grammar,
)
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.request_fields import refuse_unsupported
from antiphon.router.openai.tool_choice import ALLOWED_TOOLS, allowed_choice, choice_of_mode, named_choice

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_CALL_NAME = re.compile(r"[^\s<>]+")
"""More than a function may be called: models make names up, and clients send back what they were given."""

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
        messages=tuple(
            _message(message, f"messages[{i}]", tools) for i, message in enumerate(request.messages)
        ),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=reasoning_effort(request.reasoning_effort, "reasoning_effort"),
        response_format=_response_format(request.response_format),
    )
    check_schemas(
        conversation,
        "response_format.json_schema.schema",
        _schema_paths(request),
    )
    return conversation, dropped


def _schema_paths(request: ChatCompletionRequest) -> dict[str, str]:
    """Where the schema or the grammar of each tool's input is in the request."""
    paths = {}
    for i, tool in enumerate(request.tools or ()):
        if tool.type == CUSTOM and tool.custom is not None:
            paths[tool.custom.name] = f"tools[{i}].custom.format.grammar.definition"
        elif tool.function is not None:
            paths[tool.function.name] = f"tools[{i}].function.parameters"
    return paths


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


def _message(message: MessageParam, path: str, tools: tuple[ToolDefinition, ...]) -> ChatMessage:
    role = MessageRole(message.role)
    if message.content is None and role is not MessageRole.ASSISTANT:
        raise invalid(f"'{path}.content' is missing.", f"{path}.content", "missing_required_parameter")
    if role is MessageRole.TOOL and not message.tool_call_id:
        raise invalid(
            f"'{path}.tool_call_id' is missing.", f"{path}.tool_call_id", "missing_required_parameter"
        )
    if message.tool_calls and role is not MessageRole.ASSISTANT:
        raise invalid(f"A {role} message cannot call tools.", f"{path}.tool_calls")
    if message.function_call is not None:
        raise unsupported(f"{path}.function_call", "send the call in 'tool_calls'.")
    text = content_text(message.content, f"{path}.content")
    return ChatMessage(
        role=role,
        text=text or message.refusal or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        tool_calls=tuple(
            _call(call, f"{path}.tool_calls[{i}]", tools) for i, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id if role is MessageRole.TOOL else None,
        name=message.name,
    )


def _call(call: ToolCallParam, path: str, tools: tuple[ToolDefinition, ...]) -> ToolCall:
    if call.function is not None:
        check_call_name(call.function.name, f"{path}.function.name")
        return ToolCall(call.id, call.function.name, call.function.arguments)
    if call.custom is None:
        kind = CUSTOM if call.type == CUSTOM else "function"
        raise invalid(f"'{path}.{kind}' is missing.", f"{path}.{kind}", "missing_required_parameter")
    check_call_name(call.custom.name, f"{path}.custom.name")
    return ToolCall(call.id, call.custom.name, arguments_of(call.custom.input, call.custom.name, tools))


def check_call_name(name: str, path: str) -> None:
    """See that a call of an earlier answer has a name, which can stand in a message's header.

    Raises:
        ApiError: 400 that names ``path``.
    """
    if _CALL_NAME.fullmatch(name) is None:
        raise invalid(f"'{path}' must be one word without any of < >.", path)


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
    tools: list[tuple[str, ToolDefinition]] = []
    dropped = []
    for i, tool in enumerate(request.tools or ()):
        path = f"tools[{i}].{tool.type}"
        if tool.type not in ("function", CUSTOM):
            dropped.append(tool.type)
        elif tool.type == CUSTOM and tool.custom is not None:
            tools.append((f"{path}.name", _custom_tool(tool.custom, f"{path}.format")))
        elif tool.type == "function" and tool.function is not None:
            tools.append((f"{path}.name", function_tool(tool.function)))
        else:
            raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
    return distinct_tools(tools), dropped


def _custom_tool(tool: CustomToolParam, path: str) -> ToolDefinition:
    given = tool.format.grammar if tool.format is not None and tool.format.type == "grammar" else None
    form = CustomFormat(f"{path}.grammar")
    if given is not None:
        form = CustomFormat(form.path, given.syntax, given.definition)
    return custom_tool(tool.name, tool.description or None, form)


def function_tool(function: FunctionParam) -> ToolDefinition:
    """The definition of a function."""
    return ToolDefinition(
        function.name, function.description or None, function.parameters, bool(function.strict)
    )


def distinct_tools(tools: list[tuple[str, ToolDefinition]]) -> tuple[ToolDefinition, ...]:
    """Definitions of tools given with the path of their name.

    Raises:
        ApiError: 400 when two have the same name.
    """
    seen: set[str] = set()
    for path, tool in tools:
        if tool.name in seen:
            raise invalid(f"There are two functions named '{tool.name}'.", path)
        seen.add(tool.name)
    return tuple(tool for _, tool in tools)


def _tool_choice(request: ChatCompletionRequest, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceParam):
        if choice.type == ALLOWED_TOOLS:
            return _allowed(choice.allowed_tools, tools)
        named = {"function": choice.function, CUSTOM: choice.custom}.get(choice.type)
        if named is None and choice.type in ("function", CUSTOM):
            path = f"tool_choice.{choice.type}"
            raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
        if named is None:
            raise unsupported("tool_choice", f"a choice of type '{choice.type[:64]}' is not available.")
        return named_choice(named.name, tools)
    return choice_of_mode(choice, tools)


def _allowed(given: AllowedToolsParam | None, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    path = f"tool_choice.{ALLOWED_TOOLS}"
    if given is None:
        raise invalid(f"'{path}' is missing.", path, "missing_required_parameter")
    chosen = []
    for one in given.tools:
        named = one.custom if one.type == CUSTOM else one.function
        chosen.append((one.type, None if named is None else named.name))
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
        format_path: of the visible answer's schema in the request.
        parameters_paths: of the schema, or the grammar, of each tool.

    Raises:
        ApiError: 400 that names the part of a schema that cannot be followed.
    """
    demands = demands_of(conversation)
    for call in () if demands is None else demands.calls:
        if call.lark is not None and (problem := lark_problem(call.lark)) is not None:
            raise unusable_grammar(parameters_paths[call.name], problem)
    custom = {tool.name for tool in conversation.tools if tool.custom}
    size = 0
    for name, schema in () if demands is None else demands.schemas():
        path = format_path if name is None else parameters_paths[name]
        if name is not None and schema["type"] != "object":
            raise invalid(f"'{path}.type' must be 'object'.", f"{path}.type", "invalid_json_schema")
        try:
            size += check_schema(schema)
            if size > MAX_SCHEMAS_BYTES:
                raise UnusableSchema(f"with those before it, it is longer than {MAX_SCHEMAS_BYTES} bytes")
        except UnusableSchema as error:
            if name in custom:
                raise unusable_grammar(path, error.reason) from None
            where = path + error.path
            raise invalid(
                f"An answer cannot be kept to the schema at '{where[:256]}': {error.reason[:512]}.",
                where[:256],
                "invalid_json_schema",
            ) from None
