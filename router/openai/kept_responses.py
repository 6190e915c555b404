"""``/v1/responses/{id}``: read and delete responses that were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import JsonValue
from starlette.responses import Response

from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.errors import invalid, unsupported
from antiphon.router.openai.response_store import JsonObject
from antiphon.router.openai.responses_history import stored_response

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
_ORDERS = ("desc", "asc")
ITEMS_QUERY: list[dict[str, Any]] = [
    {
        "name": "order",
        "in": "query",
        "description": "The last item first, or the first.",
        "schema": {"type": "string", "enum": [*_ORDERS], "default": _ORDERS[0]},
    },
    {
        "name": "limit",
        "in": "query",
        "description": "Items of one page.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
    },
    {
        "name": "after",
        "in": "query",
        "description": "Id of the item that the page before ended with.",
        "schema": {"type": "string"},
    },
]
"""What the list of items can be asked for, as the API's document has it."""
RESPONSE_QUERY: list[dict[str, Any]] = [
    {
        "name": "stream",
        "in": "query",
        "description": "Nothing is streamed again.",
        "schema": {"type": "string", "enum": ["false"]},
    }
]
"""The same of a response."""


async def read_response(context: ApiContext, response_id: str, query: Mapping[str, str]) -> Response:
    """A kept response.

    Raises:
        ApiError: 404 when it is not kept (any more); 400 when its events are asked for.
    """
    if query.get("stream", "false").lower() != "false":
        # A client that waits for events would take the document for a stream without any.
        raise unsupported("stream", "the events of a response are sent once, to who created it.")
    return _json((await stored_response(context.store, response_id, "response_id")).response)


async def read_input_items(context: ApiContext, response_id: str, query: Mapping[str, str]) -> Response:
    """A page of the items of a kept response's own request.

    Raises:
        ApiError: 404 when it is not kept (any more); 400 that names what of the query cannot be used.
    """
    order, limit = _order(query.get("order")), _limit(query.get("limit"))
    stored = await stored_response(context.store, response_id, "response_id")
    items = _identified(stored.input_items, response_id)
    if order == "desc":
        items.reverse()
    first = 0
    if (after := query.get("after")) is not None:
        first = 1 + next((i for i, item in enumerate(items) if item["id"] == after), -1)
        if not first:
            raise invalid(f"No item of this response has the id '{after[:80]}'.", "after")
    page = items[first : first + limit]
    data: list[JsonValue] = [*page]
    return _json(
        {
            "object": "list",
            "data": data,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": first + limit < len(items),
        }
    )


async def delete_response(context: ApiContext, response_id: str) -> Response:
    """Forget a kept response.

    Raises:
        ApiError: 404 when it is not kept (any more).
    """
    await stored_response(context.store, response_id, "response_id")
    await context.store.delete(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def _identified(given: Sequence[JsonObject], response_id: str) -> list[JsonObject]:
    """The items, each with an id of its own: by it pages follow each other."""
    items: list[JsonObject] = []
    taken: set[JsonValue] = set()
    for i, item in enumerate(given):
        own = item.get("id")
        identifier = own if isinstance(own, str) and own not in taken else f"item_{response_id}_{i}"
        taken.add(identifier)
        items.append({**item, "id": identifier})
    return items


def _order(given: str | None) -> str:
    order = given or _ORDERS[0]
    if order not in _ORDERS:
        raise invalid(f"'order' must be one of {', '.join(_ORDERS)}.", "order")
    return order


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_ITEMS
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= MAX_ITEMS):
        raise invalid(f"'limit' must be a number from 1 to {MAX_ITEMS}.", "limit")
    return int(given)


def _json(document: JsonObject) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
