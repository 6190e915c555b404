"""The service's own OpenAPI document: bodies are read by hand, so they are described by hand as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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
    "400": "The request cannot be served as it is.",
    "401": "No accepted API key; only where keys are configured.",
    "404": "Unknown model or URL.",
    "405": "Unknown method.",
    "413": "The body is too large.",
    "429": "Too many requests at one time; see Retry-After.",
    "500": "The request failed.",
    "503": "Not ready; see Retry-After.",
    "504": "The deadline has passed.",
}


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """What a route says about its JSON body, which is of one of these models."""
    references = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Put the bodies' schemas and the common errors into the application's document."""
    _, definitions = models_json_schema([(m, "validation") for m in models], ref_template=_REFERENCE)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions.get("$defs", {}))
            schemas["Error"] = _ERROR
            for operations in document["paths"].values():
                for operation in operations.values():
                    _add_errors(operation)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_errors(operation: dict[str, Any]) -> None:
    responses = operation.setdefault("responses", {})
    responses.pop("422", None)
    for status, description in _STATUSES.items():
        schema = {"$ref": _REFERENCE.format(model="Error")}
        responses[status] = {"description": description, "content": {"application/json": {"schema": schema}}}
