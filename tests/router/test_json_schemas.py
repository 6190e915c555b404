"""Which schemas an answer can be kept to, and which part of the others is at fault."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from antiphon.router.json_schemas import MAX_EXPRESSIONS, UnusableSchema, check_schema

NOT = {"not": {"type": "string"}}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(3000):
    DEEP = {"type": "array", "items": DEEP}


class Leaf(pydantic.BaseModel):
    value: int | None = None


class Tree(pydantic.BaseModel):
    name: str
    leaves: list[Leaf]
    subtrees: list[Tree] = []


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        Tree.model_json_schema(),
        {"type": "object", "properties": {"a": {"enum": ["x", 1, None]}, "b": {"const": True}}},
        {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "number", "minimum": 0}]},
        {"type": "string", "format": "date-time"},
        {"type": "object", "properties": {"no": False}},
    ],
)
def test_usable(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path", "why"),
    [
        ({"type": "text"}, "", "Invalid type"),
        (NOT, "", "not"),
        ({"properties": {"a": {"items": NOT}, "b": {}}}, ".properties.a.items", "not"),
        ({"anyOf": [{"type": "string"}, NOT]}, ".anyOf[1]", "not"),
        ({"$defs": {"X": NOT}, "properties": {"a": {"$ref": "#/$defs/X"}}}, ".$defs.X", "not"),
        ({"properties": {"a": {"$ref": "#/$defs/Y"}}}, ".properties.a", "does not exist"),
        ({"properties": {"a": 5}}, ".properties.a", "must be an object"),
        ({"additionalProperties": {"uniqueItems": True}}, ".additionalProperties", "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)"}, "", "look-around"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "", "Unsatisfiable"),
        ({"description": "x" * 70_000}, "", "longer than"),
        ({"properties": {str(i): {"pattern": "a"} for i in range(MAX_EXPRESSIONS + 1)}}, "", "patterns"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unusable(schema: Any, path: str, why: str) -> None:
    with pytest.raises(UnusableSchema, match=why) as caught:
        check_schema(schema)
    assert caught.value.path == path


def test_a_schema_nested_too_deeply() -> None:
    with pytest.raises(UnusableSchema, match="deep"):
        check_schema(DEEP)
