"""References of a JSON schema into itself: what they lead to, and those that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from urllib.parse import unquote

from pydantic import JsonValue

Schema = Mapping[str, JsonValue]


def look_up(root: Schema, reference: str) -> Schema | None:
    """The part that a ``$ref`` such as ``#/$defs/Name`` names; None for one elsewhere or of nothing."""
    if not reference.startswith("#"):
        return None
    node: object = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, Mapping) else None


def circular_part(root: Schema, children: Callable[[Schema], Iterator[tuple[str, JsonValue]]]) -> str | None:
    """The path of a part that says nothing but to be itself (``{"$ref": "#"}``), which no value can follow.

    Args:
        children: the schemas inside a schema, each with the step that leads to it.
    """
    settled: set[int] = set()
    parts: list[tuple[str, Schema]] = [("", root)]
    while parts:
        path, part = parts.pop()
        if _leads_to_itself(root, part, settled):
            return path
        for step, child in children(part):
            if isinstance(child, Mapping):
                parts.append((path + step, child))
    return None


def _leads_to_itself(root: Schema, part: Schema, settled: set[int]) -> bool:
    """Whether what a part must be as well, by ``$ref`` and ``allOf``, comes round to what led there."""
    way: list[tuple[Schema, Iterator[Schema]]] = [(part, _also(root, part))]
    on_the_way = {id(part)}
    while way:
        here, others = way[-1]
        other = next(others, None)
        if other is None:
            way.pop()
            on_the_way.discard(id(here))
            settled.add(id(here))
        elif id(other) in on_the_way:
            return True
        elif id(other) not in settled:
            way.append((other, _also(root, other)))
            on_the_way.add(id(other))
    return False


def _also(root: Schema, part: Schema) -> Iterator[Schema]:
    reference = part.get("$ref")
    target = look_up(root, reference) if isinstance(reference, str) else None
    if target is not None:
        yield target
    all_of = part.get("allOf")
    for each in all_of if isinstance(all_of, list) else ():
        if isinstance(each, Mapping):
            yield each
