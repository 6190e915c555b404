"""The whole input of a Responses request: what came before, and what its references stand for."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from antiphon.router.openai.errors import ApiError, invalid
from antiphon.router.openai.reasoning_capsule import unseal
from antiphon.router.openai.response_store import JsonObject, ResponseStore, StoredResponse
from antiphon.router.openai.responses_schema import ResponsesRequest


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """Items of all earlier responses, and of this request with its references replaced."""

    history: list[JsonObject]
    own: list[JsonObject]

    def items(self) -> list[JsonValue]:
        """Everything in order, with reasoning unpacked where only its capsule came back."""
        return [_with_reasoning(item) for item in (*self.history, *self.own)]


async def resolve_input(request: ResponsesRequest, store: ResponseStore) -> ResolvedInput:
    """Look up what the request refers to.

    Raises:
        ApiError: 404 for a response or an item that is not stored (any more).
    """
    history: list[JsonObject] = []
    if request.previous_response_id is not None:
        previous = await stored_response(store, request.previous_response_id, "previous_response_id")
        history = previous.conversation()
    if isinstance(request.input, str):
        own: list[JsonObject] = [{"type": "message", "role": "user", "content": request.input}]
    else:
        own = [await _resolve(item, i, store) for i, item in enumerate(request.input)]
    return ResolvedInput(history, own)


async def stored_response(store: ResponseStore, response_id: str, param: str) -> StoredResponse:
    """A stored response.

    Raises:
        ApiError: 404 that names the parameter.
    """
    found = await store.get(response_id)
    if found is None:
        message = f"Response with id '{response_id[:80]}' not found."
        raise ApiError(404, message, param=param, code="response_not_found")
    return found


async def _resolve(item: JsonObject, index: int, store: ResponseStore) -> JsonObject:
    # A reference may leave out its type: then it is an id and nothing else.
    if item.get("type") != "item_reference" and set(item) != {"id"}:
        return item
    item_id = item.get("id")
    if not isinstance(item_id, str):
        path = f"input[{index}].id"
        if item_id is None:
            raise invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        raise invalid(f"Invalid type or value for '{path}': it must be a string.", path, "invalid_type")
    found = await store.item(item_id)
    if found is None:
        message = f"Item with id '{item_id[:80]}' not found."
        raise ApiError(404, message, param=f"input[{index}].id", code="item_not_found")
    return found


def _with_reasoning(item: JsonObject) -> JsonObject:
    capsule = item.get("encrypted_content")
    if item.get("type") != "reasoning" or item.get("content") or not isinstance(capsule, str):
        return item
    text = unseal(capsule)
    return item if text is None else {**item, "content": [{"type": "reasoning_text", "text": text}]}
