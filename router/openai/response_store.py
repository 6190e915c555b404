"""Responses that later requests can refer to, and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

JsonObject = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was answered, and the conversation that it ended.

    ``input_items`` are the items of its own request; ``history`` are those of all responses before it.
    """

    response: JsonObject
    history: list[JsonObject]
    input_items: list[JsonObject]

    def output_items(self) -> list[JsonObject]:
        """The items of the answer."""
        output = self.response["output"]
        if not isinstance(output, list):
            raise TypeError("a stored response has no list of output items")
        return [item for item in output if isinstance(item, dict)]

    def conversation(self) -> list[JsonObject]:
        """Every item up to and including the answer."""
        return [*self.history, *self.input_items, *self.output_items()]


class ResponseStore(Protocol):
    """Where responses are kept: bounded in size and age, the oldest go first, the newest always stays.

    Every call raises ``ApiError`` 503 where the store is out of reach.
    """

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response and its output items, and drop what is too old or too much."""
        ...

    async def get(self, response_id: str) -> StoredResponse | None:
        """A response that is still kept."""
        ...

    async def item(self, item_id: str) -> JsonObject | None:
        """An output item of a response that is still kept."""
        ...

    async def delete(self, response_id: str) -> bool:
        """Forget a response and its items; False when there is none."""
        ...

    async def close(self) -> None:
        """Release what the store holds."""
        ...
