"""A whole deployment as its users meet it: the API, bad input, clients that leave, processes that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Literal

import httpx
import openai
import psutil
import pydantic
import pytest
import pytest_asyncio
from actor_processes import pid_of_one

from antiphon.cluster.deployment import Deployment, deploy
from antiphon.cluster.resolution import resolve_deployment
from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.identity import Role

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),  # a crowded machine starts processes slowly
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL = "gpt-oss-tiny"
CONTEXT = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(local_deployment: DeploymentConfig) -> AsyncIterator[Deployment]:
    model = local_deployment.model.model_copy(update={"max_context_tokens": CONTEXT})
    config = local_deployment.model_copy(update={"model": model})
    async with deploy(resolve_deployment(config)) as running:
        await running.wait_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.urls[0], timeout=120.0, trust_env=False) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{deployment.urls[0]}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


def body(text: str = "Hello!", **fields: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_completion_tokens": 16,
        **fields,
    }


async def idle(deployment: Deployment) -> None:
    """Wait until both workers say that they hold no request and no page."""
    async with asyncio.timeout(60):
        while True:
            workers = [m.status for m in deployment.supervisor.members if m.spec.role is not Role.ROUTER]
            if all(s is not None and s.requests == 0 and s.pages_held == 0 for s in workers):
                return
            await asyncio.sleep(0.05)


def pid_of(actor: str) -> int:
    """The process of a role's actor in the deployment under test, which this process itself has started."""

    def family() -> Iterator[psutil.Process]:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if "antiphon.cluster.cli" not in child.cmdline():
                    yield from (child, *child.children(recursive=True))

    return pid_of_one(actor, family)


async def test_the_openai_sdk_lists_the_model(sdk: openai.AsyncOpenAI) -> None:
    models = await sdk.models.list()
    assert [model.id for model in models.data] == [MODEL]


async def test_the_openai_sdk_streams_what_it_also_gets_whole(sdk: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 40}
    whole = await sdk.chat.completions.create(**fields)
    stream = await sdk.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    pieces, reasoning, finish, usage = [], [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasoning.append(getattr(choice.delta, "reasoning", None) or "")
            finish = choice.finish_reason or finish
    answer = whole.choices[0]
    assert "".join(pieces) == (answer.message.content or "")
    assert "".join(reasoning) == (getattr(answer.message, "reasoning", None) or "")
    assert "".join(pieces + reasoning)
    assert finish == answer.finish_reason == "length"
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens == whole.usage.prompt_tokens


class Verdict(pydantic.BaseModel, extra="forbid"):
    right: bool
    grade: Literal["a", "b", "c"]
    remarks: list[Literal["short", "long"]] = pydantic.Field(max_length=3)


TO_THE_POINT = {"200007": 100, "17196": 100}
"""A random model's answer: end each thought at once, then the final channel. A grammar must do the rest."""


async def test_a_model_that_knows_nothing_answers_in_the_form_asked_for(sdk: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Judge this."}]
    completions = await asyncio.gather(
        *(
            sdk.chat.completions.parse(
                model=MODEL, messages=messages, response_format=Verdict, seed=seed, logit_bias=TO_THE_POINT
            )
            for seed in range(4)
        )
    )
    for completion in completions:
        assert completion.choices[0].finish_reason == "stop"
        assert isinstance(completion.choices[0].message.parsed, Verdict)
    async with sdk.responses.stream(
        model=MODEL, input="Judge this.", text_format=Verdict, extra_body={"logit_bias": TO_THE_POINT}
    ) as stream:
        response = await stream.get_final_response()
    assert isinstance(response.output_parsed, Verdict)


async def test_a_model_that_knows_nothing_calls_one_of_the_functions(sdk: openai.AsyncOpenAI) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": Verdict.model_json_schema()}}
        for name in ("judge", "judge_again")
    ]
    completion = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Judge this."}],
        tools=tools,
        tool_choice="required",
        logit_bias={**TO_THE_POINT, "200008": 100, "316": 100},
    )
    assert completion.choices[0].finish_reason == "tool_calls"
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.function.name in ("judge", "judge_again")
    Verdict.model_validate_json(call.function.arguments)


async def test_health_ready_and_metrics(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    metrics = (await http.get("/metrics")).text
    assert 'antiphon_worker_up{model_name="gpt-oss-tiny",' in metrics


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (body("word " * (CONTEXT + 10)), 400, "context"),
        (body(messages=[]), 400, "messages"),
        (body(model="gpt-5"), 404, "gpt-5"),
        (b'{"model": "gpt-oss-tiny", "messages": [', 400, "JSON"),
        (body(n=0), 400, "n"),
        (body(temperature=9), 400, "temperature"),
        (body(no_such_field=1), 400, "no_such_field"),
    ],
    ids=["too long", "no messages", "unknown model", "malformed", "n", "temperature", "unknown field"],
)
async def test_bad_input_is_one_clear_error_and_the_service_goes_on(
    http: httpx.AsyncClient, content: dict[str, object] | bytes, status: int, says: str
) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    response = await http.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"] or says == error["param"]
    again = await http.post("/v1/chat/completions", json=body(max_completion_tokens=1))
    assert again.status_code == 200, again.text


async def test_clients_that_leave_free_their_pages_on_both_workers(
    http: httpx.AsyncClient, deployment: Deployment
) -> None:
    async def leave_after(lines: int, text: str) -> None:
        request = body(text, max_completion_tokens=400, stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200
            seen = 0
            async for line in response.aiter_lines():
                seen += bool(line)
                if seen >= lines:
                    return

    await asyncio.gather(*(leave_after(n, f"Story {n}. " + "word " * (60 * n)) for n in range(8)))
    await idle(deployment)


async def test_only_loopback_is_listened_on(deployment: Deployment) -> None:
    listening: set[tuple[str, str]] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            listening |= {
                (process.name(), connection.laddr.ip)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, sorted(listening)


@pytest.mark.parametrize("actor", ["PrefillActor", "DecodeActor"])
async def test_a_killed_worker_is_replaced_and_the_answer_goes_on(
    http: httpx.AsyncClient, deployment: Deployment, actor: str
) -> None:
    request = body("Count the waves. " + "wave " * 300, max_completion_tokens=200, seed=7)
    undisturbed = (await http.post("/v1/chat/completions", json=request)).json()
    victim = pid_of(actor)

    async def disturbed() -> dict[str, object]:
        response = await http.post("/v1/chat/completions", json=request, timeout=120.0)
        assert response.status_code == 200, response.text
        return response.json()

    answers = [asyncio.create_task(disturbed()) for _ in range(3)]
    await asyncio.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    for answer in await asyncio.gather(*answers):
        assert answer["choices"][0]["message"] == undisturbed["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == undisturbed["choices"][0]["finish_reason"]
    await deployment.wait_ready()
    assert pid_of(actor) != victim
    await idle(deployment)


async def test_a_worker_that_hangs_is_killed_after_its_lease_and_the_answer_comes(
    http: httpx.AsyncClient, deployment: Deployment, local_deployment: DeploymentConfig
) -> None:
    request = body("Hold your breath. " + "breath " * 200, max_completion_tokens=24)
    undisturbed = (await http.post("/v1/chat/completions", json=request)).json()
    victim = psutil.Process(pid_of("PrefillActor"))
    victim.suspend()  # not resumed: it must be ended as it is
    began = time.monotonic()
    other = body("Breathe again. " + "breath " * 200, max_completion_tokens=24)
    late = await http.post("/v1/chat/completions", json=other, timeout=120.0)
    assert late.status_code == 200, late.text
    assert time.monotonic() - began > local_deployment.transfer.lease_s / 2
    assert not victim.is_running()
    again = (await http.post("/v1/chat/completions", json=request)).json()
    assert again["choices"][0]["message"] == undisturbed["choices"][0]["message"]
    await idle(deployment)


async def test_a_killed_router_comes_back_on_its_port_and_nothing_stays_held(
    http: httpx.AsyncClient, deployment: Deployment
) -> None:
    victim = pid_of("RouterActor")

    async def stream_until_cut() -> None:
        request = body(max_completion_tokens=CONTEXT - 200, stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200
            os.kill(victim, signal.SIGKILL)
            async for _ in response.aiter_lines():
                pass

    with pytest.raises(httpx.TransportError):
        await stream_until_cut()
    await deployment.wait_ready()
    assert deployment.urls == (str(http.base_url).rstrip("/"),)
    response = await http.post("/v1/chat/completions", json=body())
    assert response.status_code == 200
    await idle(deployment)
