"""Reading JSON schemas whose parts may refer to each other, without ever running away."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import JsonValue

from antiphon.router.schema_references import look_up

_MAX_NODES = 5000
"""Schemas visited while writing one type: definitions that multiply (ten of B in A, ten of C in B) end."""
_MAX_DEPTH = 48

Schema = Mapping[str, JsonValue]


class SchemaReader:
    """Resolves ``$ref`` and ``allOf`` inside one root schema.

    A reference to something that is being written already (a recursive schema), one that leads nowhere, and
    anything beyond the bounds on depth and number are None: ``any``.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: list[str] = []
        self._depth = 0
        self._nodes = 0

    @contextmanager
    def resolved(self, schema: JsonValue | Schema) -> Iterator[Schema | None]:
        """The schema with references followed; while the context is open, its references count as open."""
        opened = len(self._open)
        self._nodes += 1
        self._depth += 1
        try:
            if self._nodes > _MAX_NODES or self._depth > _MAX_DEPTH:
                yield None
            else:
                yield self._resolve(schema)
        finally:
            self._depth -= 1
            del self._open[opened:]

    def _resolve(self, schema: JsonValue | Schema) -> Schema | None:
        if not isinstance(schema, Mapping):
            return None
        while "$ref" in schema:
            reference = schema["$ref"]
            if not isinstance(reference, str) or reference in self._open:
                return None
            target = look_up(self._root, reference)
            if target is None:
                return None
            self._open.append(reference)
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        all_of = schema.get("allOf")
        if isinstance(all_of, list) and all_of:
            return self._merge(schema, all_of)
        return schema

    def _merge(self, schema: Schema, parts: list[JsonValue]) -> Schema:
        """One schema that says what all of ``parts`` say: keys of later ones win, properties add up."""
        merged: dict[str, JsonValue] = {}
        properties: dict[str, JsonValue] = {}
        required: list[JsonValue] = []
        own = {key: value for key, value in schema.items() if key != "allOf"}
        for part in [*(self._resolve(part) for part in parts), own]:
            if part is None:
                continue
            merged.update(part)
            more = part.get("properties")
            if isinstance(more, dict):
                properties.update(more)
            names = part.get("required")
            if isinstance(names, list):
                required += names
        if properties:
            merged["properties"] = properties
        if required:
            merged["required"] = required
        return merged


def json_text(value: JsonValue) -> str:
    """Compact JSON, letters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
