"""The page that documents every configuration key, made from the schema itself."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.section import Section

INTRODUCTION = """\
# Configuration

What `antiphon serve --config FILE` reads is one YAML file of the keys below. An unknown key is an error,
units are in the names, and `antiphon config show FILE` prints a file with every default filled in.
This page is made from the sections in `configs/` by `make docs`.
"""


TABLE_HEAD = "| key | type | default | what it is |\n|---|---|---|---|"


def render_reference() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    seen: dict[type[Section], str] = {}
    for name, section in _sections(DeploymentConfig, ""):
        if section in seen:
            parts.append(f"## `{name}`\n\nThe same keys as [`{seen[section]}`](#{seen[section]}).\n")
            continue
        seen[section] = name
        rows = "\n".join(_rows(section, ""))
        about = (section.__doc__ or "").replace("``", "`")
        parts.append(f"## `{name}`\n\n{about}\n\n{TABLE_HEAD}\n{rows}\n")
    return "\n".join(parts)


def _sections(model: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in model.model_fields.items():
        if (section := _section_of(field)) is not None:
            yield f"{prefix}{name}", section


def _rows(section: type[Section], prefix: str) -> Iterator[str]:
    """One table row per key; sections inside become dotted keys."""
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is not None:
            yield from _rows(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.default is PydanticUndefined else f"`{json.dumps(field.default)}`"
        bounds = ", ".join(_bound(item) for item in field.metadata if _bound(item))
        kind = _type_name(field.annotation) + (f", {bounds}" if bounds else "")
        description = " ".join((field.description or "").split()).replace("``", "`")
        yield f"| `{prefix}{name}` | {kind} | {default} | {description} |"


def _section_of(field: FieldInfo) -> type[Section] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return typing.cast(type[Section], annotation)
    return None


def _type_name(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(
            "none" if part is type(None) else _type_name(part) for part in typing.get_args(annotation)
        )
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def main() -> None:
    """Write the page to standard output."""
    sys.stdout.write(render_reference())


def _bound(item: object) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (value := getattr(item, attribute, None)) is not None:
            return f"{sign} {value}"
    return ""


if __name__ == "__main__":
    main()
