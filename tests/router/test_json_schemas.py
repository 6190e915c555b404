"""Which schemas an answer can be kept to, and which part of the others is at fault."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
import pytest

from antiphon.router import json_schemas
from antiphon.router.json_schemas import (
    MAX_EXPRESSIONS,
    MAX_SCHEMA_BYTES,
    UnusableSchema,
    check_schema,
    lark_problem,
)
from antiphon.router.schema_wording import CHECKED_FORMATS, in_known_words

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


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize("name", sorted(CHECKED_FORMATS))
def test_checked_formats_are_those_that_can_be_followed(name: str) -> None:
    check_schema({"type": "string", "format": name})


def test_schemas_of_the_wild_become_usable() -> None:
    schema = in_known_words(Owner.model_json_schema())
    check_schema(schema)
    assert [variant["required"] for variant in schema["properties"]["pet"]["oneOf"]] == [["kind"], ["kind"]]
    annotated = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "binary"},
            "uniqueItems": {"type": "array", "items": {"format": "path"}, "uniqueItems": False},
            "when": {"type": "string", "format": "date", "default": {"format": "binary"}},
            "what": {"const": {"format": "binary", "uniqueItems": False}},
        },
    }
    reworded = in_known_words(annotated)
    check_schema(reworded)
    assert reworded["properties"] == {
        "format": {"type": "string"},
        "uniqueItems": {"type": "array", "items": {}},
        "when": annotated["properties"]["when"],
        "what": annotated["properties"]["what"],
    }


@pytest.mark.parametrize("name", ["Größe", "Box<int>", "A B", "a#b", "a%25b", "x~1y~0z", "plain.Name-1"])
def test_references_need_not_be_spelt_as_in_a_uri(name: str) -> None:
    called = name.replace("%25", "%").replace("~1", "/").replace("~0", "~")
    schema = {"$defs": {called: {"type": "string"}}, "properties": {"$ref": {"$ref": f"#/$defs/{name}"}}}
    check_schema(in_known_words(schema))
    with pytest.raises(UnusableSchema, match="does not exist"):
        check_schema(in_known_words({**schema, "$defs": {"another": {}}}))
    elsewhere = {"$ref": "https://example.com/größe"}
    assert in_known_words(elsewhere) == elsewhere


def test_what_needs_no_other_words_stays() -> None:
    for schema in ({"oneOf": [{"type": "string"}, True], "discriminator": {}}, {"uniqueItems": True}, {}):
        assert in_known_words(schema) == schema


def test_a_schema_nested_too_deeply() -> None:
    with pytest.raises(UnusableSchema, match="deep"):
        check_schema(DEEP)


def test_looking_for_the_part_at_fault_does_not_hold_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of parts that each need one large definition, and a fault behind them all."""
    large = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{i}", f"w{i}"]} for i in range(1000)}}
    parts = {f"q{i}": {"$ref": "#/$defs/large"} for i in range(400)}
    compiled: list[int] = []
    compile_one = json_schemas._compile

    def counted(schema: Any) -> str | None:
        compiled.append(len(json.dumps(schema)))
        return compile_one(schema)

    monkeypatch.setattr(json_schemas, "_compile", counted)
    with pytest.raises(UnusableSchema, match="look-around") as caught:
        check_schema({"$defs": {"large": large}, "properties": {**parts, "last": {"pattern": "(?=a)"}}})
    assert caught.value.path == ""
    assert sum(compiled) < 6 * MAX_SCHEMA_BYTES


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, ""),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}, ""),
        ({"allOf": [{"$ref": "#"}]}, ""),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/b"}},
                "required": ["b"],
            },
            ".properties.b",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/1"}]}, ".anyOf[1]"),
    ],
)
def test_a_part_that_only_refers_to_itself_is_refused(schema: dict[str, Any], path: str) -> None:
    """The grammar of such a one compiles, and has no text."""
    with pytest.raises(UnusableSchema, match="only refers to itself") as refused:
        check_schema(schema)
    assert refused.value.path == path


def test_recursion_that_ends_is_kept() -> None:
    tree = {
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "name": {"$ref": "#/$defs/Name"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                    "parent": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
                },
                "required": ["name"],
            },
            "Name": {"allOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Text"}]},
            "Text": {"type": "string"},
        },
    }
    check_schema(tree)


def test_a_long_chain_of_references_takes_no_stack() -> None:
    """Nor a time that grows faster than the schema."""
    names = 1200
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(names)}
    check_schema({"$ref": "#/$defs/n0", "$defs": chain | {f"n{names}": {"type": "integer"}}})
    with pytest.raises(UnusableSchema, match="only refers to itself"):
        check_schema({"$ref": "#/$defs/n0", "$defs": chain | {f"n{names}": {"$ref": "#/$defs/n0"}}})


def test_a_grammar_whose_rule_only_leads_to_itself_is_refused() -> None:
    for endless in ('start: start "a"', 'start: a\na: b\nb: a "x"'):
        problem = lark_problem(endless)
        assert problem is not None
        assert "no text can follow it" in problem
    for usable in ('start: "a" start | "b"', 'start: ""', 'start: start "a" | "a"'):
        assert lark_problem(usable) is None, usable
