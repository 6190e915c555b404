"""docs/http-api.md names exactly the fields, URLs and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.completion_schema import CompletionRequest
from antiphon.router.openai.request_fields import SamplingFields
from antiphon.router.openai.responses_schema import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


def first_cells(section: str) -> set[str]:
    """Names in code marks in the first column of a section's table."""
    text = re.split(rf"^#+ {section}$", PAGE, flags=re.MULTILINE)[1]
    table = re.split(r"^#", text, flags=re.MULTILINE)[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def own_fields(model: type[SamplingFields]) -> set[str]:
    return set(model.model_fields) - set(SamplingFields.model_fields)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("Of every generating endpoint", set(SamplingFields.model_fields)),
        ("Chat completions", own_fields(ChatCompletionRequest)),
        ("Responses", own_fields(ResponsesRequest)),
        ("Completions", own_fields(CompletionRequest)),
    ],
)
def test_request_fields(section, fields):
    assert first_cells(section) == fields


def test_metrics():
    declared = set()
    for family in RouterMetrics("tiny").registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        declared.add(family.name + ("" if family.name.endswith(suffix) else suffix))
    assert first_cells("Metrics") == declared


async def test_urls(deploy):
    deployment = await deploy()
    paths = (await deployment.http.get("/openapi.json")).json()["paths"]
    rows = [line for line in re.split(r"^## ", PAGE, flags=re.MULTILINE)[0].splitlines() if line[0:1] == "|"]
    named = set(re.findall(r"(/[a-z][a-z0-9_/.{}]*)`", "\n".join(rows))) - {"/openapi.json"}
    assert {_shape(path) for path in named} == {_shape(path) for path in paths}


def _shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)
