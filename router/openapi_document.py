"""The service's own OpenAPI document: bodies are read and answers written by hand, and described here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "The request cannot be served as it is.",
    401: "No accepted API key; only where keys are configured.",
    404: "Unknown model, response or item.",
    405: "Unknown method.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "Too many requests at one time; see Retry-After.",
    500: "The request failed.",
    503: "Not ready; see Retry-After.",
    504: "The deadline has passed.",
}
EVERYWHERE = (405, 500)
"""Statuses of every operation, errors of the service itself included."""
GENERATING = (400, 401, 404, 408, 413, 429, 503, 504)
READING = (400, 401, 404, 408, 413)
STORED = (401, 404, 503)
STREAM = {"text/event-stream": "Server-sent events, where `stream` is true."}
TEXT = {"text/plain": "Lines of text."}


def operation(
    *,
    body: Sequence[type[BaseModel]] = (),
    example: dict[str, Any] | None = None,
    answer: type[BaseModel] | None = None,
    also: dict[str, str] | None = None,
    errors: Sequence[int] = (),
    links: dict[str, Any] | None = None,
    query: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What a route says about itself, for ``openapi_extra``.

    ``body`` is a JSON object of one of these models, ``answer`` what comes back as JSON with status 200, and
    ``also`` other media types of it. ``errors`` are its own besides those that every operation has, ``query``
    its parameters behind the question mark.
    """
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _reference(answer)}
    for media_type, about in (also or {}).items():
        content[media_type] = {"schema": {"description": about}}
    ok: dict[str, Any] = {"description": "The answer.", "content": content}
    if links is not None:
        ok["links"] = links
    described: dict[str, Any] = {"responses": {"200": ok}}
    for status in sorted({*EVERYWHERE, *errors}):
        schema = {"$ref": _REFERENCE.format(model="Error")}
        described["responses"][str(status)] = {
            "description": _STATUSES[status],
            "content": {"application/json": {"schema": schema}},
        }
    if query:
        described["parameters"] = [*query]
    if body:
        references = [_reference(model) for model in body]
        media: dict[str, Any] = {
            "schema": references[0] if len(references) == 1 else {"anyOf": references},
            "example": example,
        }
        described["requestBody"] = {"required": True, "content": {"application/json": media}}
    return described


def describe(
    app: FastAPI, bodies: Sequence[type[BaseModel]], answers: Sequence[type[BaseModel]], model_name: str
) -> None:
    """Put the schemas of bodies and answers into the application's document.

    ``model_name`` is the one value that a request's ``model`` may have at this deployment.
    """
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in bodies]
    modes += [(model, "serialization") for model in answers]
    _, definitions = models_json_schema(modes, ref_template=_REFERENCE)
    schemas: dict[str, Any] = definitions.get("$defs", {})
    for body in bodies:
        named = schemas[body.__name__]["properties"].get("model")
        if named is not None:
            named |= {"examples": [model_name]}
            for branch in named.get("anyOf", [named]):
                if branch.get("type") == "string":
                    branch["enum"] = [model_name]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            document.setdefault("components", {})["schemas"] = {**schemas, "Error": _ERROR}
            for operations in document["paths"].values():
                for described in operations.values():
                    described["responses"].pop("422", None)
                    for parameter in described.get("parameters", ()):
                        if parameter["name"] == "model":
                            parameter["schema"]["enum"] = [model_name]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
