"""Bodies of every shape: the answer is a success or an error that names something, never a crash."""

from __future__ import annotations

import random
from collections.abc import Callable

import orjson
import pytest

from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.completion_schema import CompletionRequest
from antiphon.router.openai.responses_schema import ResponsesRequest
from antiphon.router.openai.tokenize import DetokenizeRequest

STRINGS = ["", "a", "auto", "none", "required", "user", "assistant", "tool", "text", "function", "message"]
STRINGS += [
    "reasoning",
    "function_call",
    "function_call_output",
    "item_reference",
    "json_schema",
    "\x00",
    "é👍",
]
KEYS = ["role", "content", "type", "text", "name", "function", "arguments", "id", "call_id", "tool_calls"]
KEYS += ["tool_call_id", "parameters", "description", "schema", "json_schema", "effort", "format", "output"]
KEYS += ["include_usage", "summary", "encrypted_content", "5", "strict"]


def value(rng: random.Random, depth: int) -> object:
    """A random JSON value that leans towards what requests are made of."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, 1, 2, -1, 5, 100, 2**40, 2**63 - 1])
    if kind == 2:
        return rng.choice([0.0, 0.5, 1.0, 2.0, -1.5, 1e300])
    if kind < 6:
        return rng.choice(STRINGS)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randrange(5))}


def message(rng: random.Random) -> object:
    """A message or an item that is nearly right."""
    base = {"role": rng.choice(["user"] * 3 + ["assistant", "tool"]), "content": rng.choice(STRINGS)}
    if rng.random() < 0.5:
        base |= {rng.choice(KEYS): value(rng, 3)}
    return base


def body(rng: random.Random, fields: list[str]) -> dict[str, object]:
    """A request: valid at heart, with a few fields of random values."""
    request: dict[str, object] = {"model": "tiny", "max_tokens": 3, "max_output_tokens": 3}
    makers: dict[str, Callable[[], object]] = {
        "messages": lambda: [message(rng) for _ in range(rng.randrange(4))],
        "input": lambda: [message(rng) for _ in range(rng.randrange(4))],
        "prompt": lambda: rng.choice(STRINGS),
        "tokens": lambda: [rng.randrange(300) for _ in range(3)],
    }
    if "input" in fields:
        del makers["prompt"]  # a stored prompt of the Responses API, which is refused
    request |= {name: make() for name, make in makers.items() if name in fields}
    for name in rng.sample(fields, k=rng.randrange(min(len(fields), 3) + 1)):
        request[name] = value(rng, 4)
    return {name: given for name, given in request.items() if name in fields or rng.random() < 0.02}


@pytest.mark.parametrize(
    ("path", "models"),
    [
        ("/v1/chat/completions", [ChatCompletionRequest]),
        ("/v1/completions", [CompletionRequest]),
        ("/v1/responses", [ResponsesRequest]),
        ("/tokenize", [ChatCompletionRequest]),
        ("/detokenize", [DetokenizeRequest]),
    ],
)
async def test_no_body_crashes_the_service(deploy, path, models):
    deployment = await deploy()
    rng = random.Random(20250628)
    fields = sorted({name for model in models for name in model.model_fields})
    statuses: dict[int, int] = {}
    for _ in range(400):
        request = body(rng, fields)
        response = await deployment.http.post(path, content=orjson.dumps(request))
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        # A deadline of a second may pass where nobody had time for the request.
        answers = (200, 400, 404, 503, 504) if request.get("timeout_s") else (200, 400, 404)
        assert response.status_code in answers, (request, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert "Value error" not in error["message"], error
            assert error["code"], (request, error)
    # The bodies reach both sides of the door.
    assert statuses.get(200, 0) > 20
    assert statuses.get(400, 0) > 20
    assert not deployment.workers.workers["d0"].requests
