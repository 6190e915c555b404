"""Schemas for which the project has a form of its own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from antiphon.router.harmony.typescript import function_type


def _properties(properties: dict[str, Any], **more: Any) -> str:
    text = function_type("f", None, {"type": "object", "properties": properties, **more})
    return text.removeprefix("type f = (_: {\n").removesuffix("}) => any;")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a?: string | null,\n"),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "a?: string | null, // default: null\n",
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "a?: number,\n"),
        (
            {"anyOf": [{"type": "object", "properties": {"x": {"type": "string"}}}, {"type": "null"}]},
            "a?: {\n    x?: string,\n    } | null,\n",
        ),
        ({"enum": ["x", "y"]}, 'a?: "x" | "y",\n'),
        ({"type": "integer", "enum": [1, 2]}, "a?: 1 | 2,\n"),
        ({"enum": ["x", 1, True, None]}, 'a?: "x" | 1 | true | null,\n'),
        ({"type": ["string", "null"], "enum": ["x"]}, 'a?: "x" | null,\n'),
        ({"type": "string", "enum": ['"'], "default": '"'}, 'a?: "\\"", // default: "\\""\n'),
        ({"const": "x"}, 'a?: "x",\n'),
        ({"const": 3, "description": "Always."}, "// Always.\na?: 3,\n"),
        ({"type": "null"}, "a?: null,\n"),
        ({"type": ["array", "null"], "items": {"type": "string"}}, "a?: string[] | null,\n"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "a?:\n | string\n | null\n,\n"),
        ({"type": "array", "items": {"enum": ["x", "y"]}}, 'a?: ("x" | "y")[],\n'),
        ({"type": "array", "items": {"type": ["string", "number"]}}, "a?: (string | number)[],\n"),
        ({"type": "array", "items": {"type": "string", "nullable": True}}, "a?: (string | null)[],\n"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "a?: (string | null)[],\n",
        ),
        (
            {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "number"}]}},
            "a?: (\n     | string\n     | number\n    )[],\n",
        ),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "a?: number[][],\n"),
        ({"type": "array", "prefixItems": [{"type": "string"}, {}]}, "a?: [string, any],\n"),
        ({"type": "array", "items": True}, "a?: any[],\n"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "a?: {\n    [key: string]: number,\n    },\n",
        ),
        ({"type": "object", "additionalProperties": False}, "a?: {\n    },\n"),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"p": {}}, "required": ["p"]},
                    {"properties": {"q": {}}},
                ]
            },
            "a?: {\n    p: any,\n    q?: any,\n    },\n",
        ),
        ({"allOf": [{"type": "string"}], "description": "D."}, "// D.\na?: string,\n"),
        ({"type": "string", "description": "One.\nTwo."}, "// One.\n// Two.\na?: string,\n"),
        ({"type": "string", "examples": ["x", 1]}, '// Examples:\n// - "x"\n// - 1\na?: string,\n'),
        ({}, "a?: any,\n"),
        (True, "a?: any,\n"),
        (None, "a?: any,\n"),
        ({"type": "no such type"}, "a?: any,\n"),
        ({"type": 7, "enum": "x", "anyOf": {}, "properties": []}, "a?: any,\n"),
    ],
)
def test_property(schema: Any, expected: str) -> None:
    assert _properties({"a": schema}) == expected


@pytest.mark.parametrize(
    ("name", "written"),
    [("a-b", '"a-b"'), ("x y", '"x y"'), ("9a", '"9a"'), ('q"', '"q\\""'), ("été", "été"), ("$a_1", "$a_1")],
)
def test_property_names(name: str, written: str) -> None:
    assert _properties({name: {"type": "string"}}, required=[name]) == f"{written}: string,\n"


def test_references_are_resolved() -> None:
    definitions = {"X": {"type": "object", "properties": {"m": {"type": "string"}}, "required": ["m"]}}
    x = {"$ref": "#/$defs/X", "description": "An x."}
    xs = {"type": "array", "items": {"$ref": "#/$defs/X"}}
    text = _properties({"x": x, "xs": xs}, **{"$defs": definitions})
    assert text == (
        "// An x.\nx?:     // An x.\n{\n    m: string,\n    },\nxs?: {\n    m: string,\n    }[],\n"
    )


def test_a_reference_with_escapes() -> None:
    assert _properties(
        {"a": {"$ref": "#/definitions/x~1y~0%20z"}}, definitions={"x/y~ z": {"type": "boolean"}}
    ) == ("a?: boolean,\n")


def test_recursion_ends() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "value": {"type": "number"}}}
    text = _properties({"list": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": node}})
    assert text == "list?: {\n    next?: any,\n    value?: number,\n    },\n"
    assert function_type("f", None, {"$ref": "#"}) == "type f = (_: any) => any;"
    mutual = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}
    assert _properties({"a": {"$ref": "#/$defs/A"}}, **{"$defs": mutual}) == "a?: any,\n"


@pytest.mark.parametrize("reference", ["#/$defs/None", "other.json#/x", "#/$defs/X/7", 5, ""])
def test_a_reference_that_leads_nowhere(reference: Any) -> None:
    assert _properties({"a": {"$ref": reference}}, **{"$defs": {"X": []}}) == "a?: any,\n"


def test_definitions_that_multiply_are_cut_off() -> None:
    definitions = {}
    for level in range(12):
        properties = {f"p{i}": {"$ref": f"#/$defs/L{level + 1}"} for i in range(10)}
        definitions[f"L{level}"] = {"type": "object", "properties": properties}
    started = time.process_time()
    text = _properties({"a": {"$ref": "#/$defs/L0"}}, **{"$defs": definitions})
    assert len(text) < 1_000_000
    assert time.process_time() - started < 2


def test_schemas_nested_deeply() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    assert _properties({"a": schema}).startswith("a?: any[][]")


@pytest.mark.parametrize("parameters", [None, {}])
def test_no_parameters(parameters: dict[str, Any] | None) -> None:
    assert function_type("f", "F.", parameters) == "// F.\ntype f = () => any;"


def test_descriptions_of_several_lines() -> None:
    assert function_type("f", "One.\n\nTwo.", None) == "// One.\n// \n// Two.\ntype f = () => any;"
