"""JSON schemas in the words that the compiler of grammars knows, saying what they said before.

Four habits of schemas in the wild are not constraints, or are ones that can be said otherwise:

- a ``format`` that names none of the checked ones is an annotation, by JSON Schema's own rule;
- ``uniqueItems: false`` forbids nothing;
- the ``discriminator`` of a ``oneOf`` names a property that every variant must have, by OpenAPI's rule, and
  that sets the variants apart;
- a ``$ref`` into the schema itself may have letters that a URI writes in another way (``#/$defs/Größe``).
"""

from __future__ import annotations

from urllib.parse import quote

from pydantic import JsonValue

CHECKED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that answers are kept to."""
_LITERAL_KEYS = frozenset({"const", "enum", "default", "examples", "example"})
"""What they hold is data, not a schema."""
_NAMED_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""What they hold are schemas by name: a property may be called ``format``."""
_OF_A_FRAGMENT = "/?:@!$&'()*+,;=%"
"""What a URI's fragment may hold besides letters, digits and ``-._~``."""


def in_known_words(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The same schema, reworded; a part that needs it not stays as it is.

    Raises:
        RecursionError: it is nested too deeply.
    """
    return {
        key: _value(key, value, schema) for key, value in schema.items() if not _binds_nothing(key, value)
    }


def _binds_nothing(key: str, value: JsonValue) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in CHECKED_FORMATS
    return key == "uniqueItems" and value is False


def _value(key: str, value: JsonValue, schema: dict[str, JsonValue]) -> JsonValue:
    if key in _LITERAL_KEYS:
        return value
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return f"#{quote(value[1:], safe=_OF_A_FRAGMENT)}"
    if key in _NAMED_KEYS and isinstance(value, dict):
        return {name: _reworded(named) for name, named in value.items()}
    if key == "oneOf" and isinstance(value, list):
        return [_variant(_reworded(variant), schema.get("discriminator")) for variant in value]
    return _reworded(value)


def _reworded(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return in_known_words(value)
    return [_reworded(item) for item in value] if isinstance(value, list) else value


def _variant(variant: JsonValue, discriminator: JsonValue) -> JsonValue:
    """One schema of a ``oneOf``, with the property that sets it apart."""
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if not isinstance(variant, dict) or not isinstance(name, str):
        return variant
    required = variant.get("required", [])
    if not isinstance(required, list) or name in required:
        return variant
    return {**variant, "required": [*required, name]}
