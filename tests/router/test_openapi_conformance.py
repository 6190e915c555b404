"""Requests made from the service's own OpenAPI document: no crash, no answer that it does not describe."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

from antiphon.router.byte_format import ARGUMENTS, CONTENT, REASONING, TOOL, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.served_model import ServedModel

MODEL = ServedModel(name="tiny", max_context_tokens=8192, created=1_700_000_000, fingerprint="fp_test")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
    "unsupported_method",
    "use_after_free",
    "ensure_resource_availability",
)
EXAMPLES = 20
"""Random requests of an operation; what is made does not depend on how long it takes."""
LONGEST_RUN_S = 300


async def document_without_deadlines(deployment) -> dict:
    """A deadline that has passed is rightly a 504, which would count as a crash: the field is left out."""
    document = (await deployment.http.get("/openapi.json")).json()
    for name in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"):
        del document["components"]["schemas"][name]["properties"]["timeout_s"]
    return document


async def test_generated_requests(deploy, tmp_path: Path):
    parts = ((REASONING, "r"), (CONTENT, "hello"), (TOOL, "f"), (ARGUMENTS, "{}"))
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer(*parts)), MODEL)
    document = tmp_path / "openapi.json"
    described = await document_without_deadlines(deployment)
    document.write_text(json.dumps(described))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(document)]
    command += ["--url", deployment.server.url, "--checks", ",".join(CHECKS), "--continue-on-failure"]
    command += ["--max-examples", str(EXAMPLES), "--generation-deterministic", "--no-shrink"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(LONGEST_RUN_S):
            output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output
    cases, tested = re.search(r"(\d+) generated", output), re.search(r"Tested: (\d+)", output)
    assert cases is not None, output
    assert tested is not None, output
    operations = sum(len(path) for path in described["paths"].values())
    assert int(tested[1]) == operations, output
    assert int(cases[1]) > EXAMPLES * operations, output
    # The requests reach the workers, and not only the checks at the door.
    assert await deployment.metric("requests_total", endpoint="/v1/responses", status_code="200") >= 1
    assert await deployment.metric("requests_total", endpoint="/v1/chat/completions", status_code="200") >= 1
    assert not deployment.server.open_requests


async def test_the_document_names_the_served_model(deploy):
    deployment = await deploy()
    document = (await deployment.http.get("/openapi.json")).json()
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert properties["model"]["enum"] == ["tiny"]
    parameter = document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]
    assert parameter["schema"]["enum"] == ["tiny"]
    example = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert (await deployment.http.post("/v1/chat/completions", json=example["example"])).status_code == 200


async def test_a_405_names_every_method_of_the_path(deploy):
    deployment = await deploy()
    response = await deployment.http.put("/v1/responses/resp_x")
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET, HEAD"
