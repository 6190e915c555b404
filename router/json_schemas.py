"""Whether an output can be kept to a JSON schema, or to a grammar: decided here, before anything runs.

Decode workers compile schemas with the same library, llguidance, so that what passes here works there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer
from pydantic import JsonValue

from antiphon.protocol.errors import AntiphonError
from antiphon.router.schema_references import Schema, circular_part

MAX_SCHEMA_BYTES = 64 * 1024
"""Of a schema as JSON. Compiling takes up to about 0.1 s at this size."""
MAX_SCHEMAS_BYTES = 512 * 1024
"""Of all schemas that one answer may have to follow."""
MAX_EXPRESSIONS = 100
"""Patterns and formats of a schema, which cost ten times what anything else does."""
_MAX_PROBES = 500
"""Parts that are compiled on their own to find the one at fault."""
_MAX_PROBED_BYTES = 4 * MAX_SCHEMA_BYTES
"""Of those parts together, each with the definitions of the whole: bounds how long the router is held."""
_DEFINITIONS = ("$defs", "definitions")
_MAPS_OF_SCHEMAS = (*_DEFINITIONS, "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_NO_SCHEMA = "a schema must be an object or a boolean"
_EXPRESSIONS = frozenset({"pattern", "format"})
_NAMES_TOKENS = "no tokenizer"
"""How the library's warning about a token in a grammar begins."""


class UnusableSchema(AntiphonError):
    """No output can be kept to this schema. ``path`` leads from the schema to the part at fault."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


def check_schema(schema: Schema) -> int:
    """Raise unless an output can be kept to the schema; its bytes as JSON.

    Raises:
        UnusableSchema: says which part is at fault, and why.
    """
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise UnusableSchema("it is nested too deeply") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise UnusableSchema(f"it is longer than {MAX_SCHEMA_BYTES} bytes")
    problem = _problem_of(text)
    if problem is not None:
        raise UnusableSchema(problem.reason, problem.path)
    return len(text)


@lru_cache(maxsize=128)
def lark_problem(definition: str) -> str | None:
    """Why no output can be kept to a Lark grammar in llguidance's dialect; None when it can."""
    if len(definition) > MAX_SCHEMA_BYTES:
        return f"it is longer than {MAX_SCHEMA_BYTES} characters"
    grammar = LLMatcher.grammar_from_lark(definition)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        return " ".join(messages[0].split())
    # Markers and token ids are checked by the vocabulary alone; an input is text, and has none of them.
    if named := next((one for one in messages if one.startswith(_NAMES_TOKENS)), None):
        return f"it names tokens ({named})"
    return None if _can_begin(grammar) else "no text can follow it: its first rule only leads to itself"


@dataclass(frozen=True, slots=True)
class _Problem:
    reason: str
    path: str


@lru_cache(maxsize=512)
def _problem_of(text: str) -> _Problem | None:
    schema = json.loads(text)
    if _expressions(schema) > MAX_EXPRESSIONS:
        return _Problem(f"it has more than {MAX_EXPRESSIONS} patterns and formats", "")
    reason = _compile(schema)
    if reason is not None:
        return _locate(schema, reason)
    circular = circular_part(schema, _children)
    return None if circular is None else _Problem("it only refers to itself", circular)


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    """A vocabulary of bytes: whether anything can be said depends on no other one."""
    return LLTokenizer("byte")


def _can_begin(grammar: str) -> bool:
    """Whether any text can be the beginning of what a grammar describes."""
    matcher = LLMatcher(_bytes(), grammar)
    matcher.compute_bitmask()  # which is an error where nothing may come and nothing may end
    return not matcher.is_error()


def _compile(schema: JsonValue | Schema) -> str | None:
    """Why a schema cannot be compiled."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(messages[0].split()) if is_error else None


def _locate(root: Schema, reason: str) -> _Problem:
    """The smallest part found that cannot be compiled on its own, given the definitions of the whole.

    Where finding a smaller one would hold the router for too long, it is not looked for.
    """
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    part: JsonValue | Schema = root
    path, probes, probed_bytes = "", 0, 0
    while True:
        for step, child in _children(part):
            if isinstance(child, bool):
                continue
            probe = {**definitions, **child} if isinstance(child, dict) else None
            probes += 1
            probed_bytes += len(json.dumps(probe))
            if probes > _MAX_PROBES or probed_bytes > _MAX_PROBED_BYTES:
                return _Problem(reason, path)
            fault = _NO_SCHEMA if probe is None else _compile(probe)
            if fault is not None:
                part, path, reason = child, path + step, fault
                break
        else:
            return _Problem(reason, path)


def _children(part: JsonValue | Schema) -> Iterator[tuple[str, JsonValue]]:
    """The schemas inside a schema, each with the step that leads to it."""
    if not isinstance(part, Mapping):
        return
    for key in _MAPS_OF_SCHEMAS:
        named = part.get(key)
        if isinstance(named, dict):
            yield from ((f".{key}.{name}", child) for name, child in named.items())
    for key in _LISTS_OF_SCHEMAS:
        listed = part.get(key)
        if isinstance(listed, list):
            yield from ((f".{key}[{i}]", child) for i, child in enumerate(listed))
    for key in _SCHEMAS:
        if key in part:
            yield f".{key}", part[key]


def _expressions(schema: JsonValue) -> int:
    if isinstance(schema, dict):
        own = sum(key in _EXPRESSIONS and isinstance(value, str) for key, value in schema.items())
        patterns = schema.get("patternProperties")
        own += len(patterns) if isinstance(patterns, dict) else 0
        return own + sum(_expressions(value) for value in schema.values())
    return sum(map(_expressions, schema)) if isinstance(schema, list) else 0
