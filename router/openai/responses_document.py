"""The response object of the Responses API, in every state of its life."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from antiphon.router.conversation import Conversation, ResponseFormatKind
from antiphon.router.openai.custom_tools import CUSTOM
from antiphon.router.openai.response_store import JsonObject
from antiphon.router.openai.responses_schema import ResponsesRequest
from antiphon.router.openai.usage import TokenCounts


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What stays the same from the first event to the stored object. ``created_at`` is in Unix seconds."""

    response_id: str
    created_at: int
    model: str
    request: ResponsesRequest
    conversation: Conversation

    def document(
        self,
        status: str,
        output: list[JsonValue],
        *,
        completed_at: int | None = None,
        counts: TokenCounts | None = None,
        incomplete_reason: str | None = None,
        error: JsonObject | None = None,
    ) -> JsonObject:
        """The object: every key is there, null where there is nothing to say."""
        request = self.request
        incomplete: JsonObject | None = {"reason": incomplete_reason} if incomplete_reason else None
        effort = self.conversation.reasoning_effort
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": completed_at,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": self.conversation.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": effort.value if effort else None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": self._tools(),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "presence_penalty": request.presence_penalty or 0.0,
            "frequency_penalty": request.frequency_penalty or 0.0,
            "truncation": request.truncation or "disabled",
            "usage": None if counts is None else _usage(counts),
            "user": request.user,
        }

    def _format(self) -> JsonObject:
        """The form of the visible answer."""
        form = self.conversation.response_format
        if form.kind is not ResponseFormatKind.JSON_SCHEMA:
            return {"type": form.kind.value}
        return {
            "type": form.kind.value,
            "name": form.name,
            "description": form.description,
            "schema": form.schema or {"type": "object"},
            "strict": form.strict,
        }

    def _tools(self) -> list[JsonValue]:
        """The tools that the model was told about; hosted ones were left out of the prompt."""
        custom = {tool.get("name"): tool for tool in self.request.tools or () if tool.get("type") == CUSTOM}
        return [
            custom[tool.name]
            if tool.custom
            else {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in self.conversation.tools
        ]


def _usage(counts: TokenCounts) -> JsonObject:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }
