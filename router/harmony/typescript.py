"""JSON schemas as the TypeScript types in which Harmony tells the model about functions.

Byte for byte what openai-harmony writes for the forms that it renders: objects, arrays, scalar types, string
enums, ``oneOf``, ``nullable``, defaults, titles, examples and descriptions, with its indentation. Where it
has no form of its own (``anyOf``, ``allOf``, ``$ref``, ``const``, other enums, unions inside arrays, null,
tuples, maps, descriptions of several lines, names that are no identifiers) this module writes plain
TypeScript.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import JsonValue

from antiphon.router.harmony.schemas import SchemaReader, json_text

_IDENTIFIER = re.compile(r"[^\W\d][\w$]*|\$[\w$]*")
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_PROPERTY_INDENT = "    "
_VARIANT_INDENT = "   "

Schema = Mapping[str, JsonValue]


def function_type(name: str, description: str | None, parameters: Schema | None) -> str:
    """The declaration of one function, without a trailing newline.

    ``parameters`` is a JSON schema object; None or ``{}`` gives a function without parameters. Never fails: a
    part of the schema that makes no sense is ``any``.
    """
    comment = comment_lines(description or "", "")
    if not parameters:
        return f"{comment}type {name} = () => any;"
    return f"{comment}type {name} = (_: {_Writer(parameters).type_of(parameters, '')}) => any;"


def comment_lines(text: str, indent: str) -> str:
    """``text`` as ``//`` comments, each line ended by a newline; nothing for an empty text."""
    return "".join(f"{indent}// {line}\n" for line in text.splitlines())


class _Writer:
    """Writes the types of one root schema, whose references it resolves."""

    def __init__(self, root: Schema) -> None:
        self._reader = SchemaReader(root)

    def type_of(self, schema: JsonValue | Schema, indent: str) -> str:
        """The type of one schema; following lines are indented by ``indent``."""
        with self._reader.resolved(schema) as node:
            return self._type_of_node(node, indent)

    def _type_of_node(self, node: Schema | None, indent: str) -> str:
        if node is None:
            return "any"
        text = self._plain_type(node, indent)
        if node.get("nullable") is True and not node.get("oneOf") and "null" not in text.split(" | "):
            text += " | null"
        return text

    def _plain_type(self, node: Schema, indent: str) -> str:
        if "const" in node:
            return json_text(node["const"])
        one_of = node.get("oneOf")
        if isinstance(one_of, list) and one_of:
            return "\n" + self._variants(one_of, indent, described=False)
        any_of = node.get("anyOf")
        if isinstance(any_of, list) and any_of:
            return _union([self.type_of(variant, indent) for variant in any_of])
        enum = node.get("enum")
        if isinstance(enum, list) and enum:
            return _union([json_text(value) for value in enum] + (["null"] if _allows_null(node) else []))
        types = node.get("type")
        if isinstance(types, list):
            return " | ".join(self._named_type(name, node, indent) for name in types) or "any"
        return self._named_type(types, node, indent)

    def _named_type(self, name: JsonValue, node: Schema, indent: str) -> str:
        if name == "object":
            # A list of types names the object without spelling it out unless there is something to spell.
            if isinstance(node.get("type"), list) and not node.get("properties"):
                return "object"
            return self._object(node, indent)
        if name == "array":
            return self._array(node, indent)
        if name is None and isinstance(node.get("properties"), dict):
            return self._object(node, indent)
        return _SCALARS.get(name, "any") if isinstance(name, str) else "any"

    def _array(self, node: Schema, indent: str) -> str:
        prefix = node.get("prefixItems")
        if isinstance(prefix, list) and prefix:
            return "[" + ", ".join(self.type_of(item, indent) for item in prefix) + "]"
        if "items" not in node:
            return "Array<any>"
        item = self.type_of(node["items"], indent)
        with self._reader.resolved(node["items"]) as items:
            if items is not None and _is_union(items, item):
                item = f"({item}\n{indent})" if item.startswith("\n") else f"({item})"
        return f"{item}[]"

    def _object(self, node: Schema, indent: str) -> str:
        properties = node.get("properties")
        required = node.get("required")
        lines = [comment_lines(_string(node, "description"), indent), "{\n"]
        for key, value in properties.items() if isinstance(properties, dict) else ():
            mark = "" if isinstance(required, list) and key in required else "?"
            name = key if _IDENTIFIER.fullmatch(key) else json_text(key)
            lines.append(self._property(name + mark, value, indent))
        additional = node.get("additionalProperties")
        if isinstance(additional, dict) and additional:
            lines.append(f"{indent}[key: string]: {self.type_of(additional, indent + _PROPERTY_INDENT)},\n")
        return "".join(lines) + indent + "}"

    def _property(self, name: str, schema: JsonValue, indent: str) -> str:
        with self._reader.resolved(schema) as node:
            if node is None:
                return f"{indent}{name}: any,\n"
            one_of = node.get("oneOf")
            comments = _property_comments(node, indent)
            if isinstance(one_of, list) and one_of and "const" not in node:
                if "default" in node:
                    comments += f"{indent}// default: {json_text(node['default'])}\n"
                described = isinstance(node.get("description"), str)
                return f"{comments}{indent}{name}:\n{self._variants(one_of, indent, described)}\n{indent},\n"
            text = self._type_of_node(node, indent + _PROPERTY_INDENT)
            default = f", // default: {_default_text(node)}" if "default" in node else ","
            return f"{comments}{indent}{name}: {text}{default}\n"

    def _variants(self, variants: list[JsonValue], indent: str, described: bool) -> str:
        """One line a variant; under a ``described`` property the first does not say what it is."""
        lines = []
        for position, variant in enumerate(variants):
            line = f"{indent} | {self.type_of(variant, indent + _VARIANT_INDENT)}"
            with self._reader.resolved(variant) as node:
                remarks = [] if node is None else _variant_remarks(node, silent=described and position == 0)
            lines.append(f"{line} // {' '.join(remarks)}" if remarks else line)
        return "\n".join(lines)


def _property_comments(node: Schema, indent: str) -> str:
    text = ""
    if isinstance(node.get("title"), str):
        text += (comment_lines(_string(node, "title"), indent) or f"{indent}// \n") + f"{indent}//\n"
    description = ""
    if isinstance(node.get("description"), str):
        description = comment_lines(_string(node, "description"), indent) or f"{indent}// \n"
    has_one_of = bool(node.get("oneOf"))
    if not has_one_of:
        text += description
    examples = node.get("examples")
    if isinstance(examples, list) and examples:
        text += f"{indent}// Examples:\n" + "".join(
            f"{indent}// - {json_text(value)}\n" for value in examples
        )
    return text + description if has_one_of else text


def _variant_remarks(node: Schema, silent: bool) -> list[str]:
    remarks = [] if silent else _string(node, "description").splitlines()
    if "default" in node:
        remarks.append(f"default: {_default_text(node)}")
    return remarks


def _default_text(node: Schema) -> str:
    """An enum's default stands bare, as openai-harmony writes it, unless that would be ambiguous."""
    default = node["default"]
    if (
        isinstance(default, str)
        and isinstance(node.get("enum"), list)
        and json_text(default) == f'"{default}"'
    ):
        return default
    return json_text(default)


def _union(types: list[str]) -> str:
    return " | ".join(dict.fromkeys(types))


def _is_union(node: Schema, text: str) -> bool:
    if text.startswith("\n"):
        return True
    if node.get("nullable") is True or any(
        isinstance(node.get(key), list) for key in ("anyOf", "enum", "type")
    ):
        return " | " in text
    return False


def _allows_null(node: Schema) -> bool:
    types = node.get("type")
    return isinstance(types, list) and "null" in types


def _string(node: Schema, key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""
