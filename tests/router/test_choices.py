"""Several choices of one prompt: at one decode worker, with one prefill, also when that worker dies."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.protocol.codec import encode
from antiphon.protocol.link_settings import LinkSettings
from antiphon.protocol.messages import GenerateRequest, PrefillRequest, SamplingParams
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.openai.request_fields import MAX_CHOICES, MAX_LOGIT_BIASES
from antiphon.router.openai.sent_size import MAX_SENT_BYTES
from antiphon.router.served_model import ServedModel

ANSWER = byte_answer((CONTENT, "hello there"))


def asked(deployment: Any, kind: type, prefix: str) -> list[Any]:
    """Messages of one kind that workers of one role were sent, in order."""
    return [
        message
        for name, worker in deployment.workers.workers.items()
        if name.startswith(prefix)
        for message in worker.sent
        if isinstance(message, kind)
    ]


async def test_choices_share_one_prefill(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: ANSWER, prefill=2, decode=2))
    document = (await deployment.chat(n=4, seed=5)).json()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["hello there"] * 4
    first, *others = asked(deployment, GenerateRequest, "d")
    assert first.fork_of == ""
    assert [message.fork_of for message in others] == [first.request_id] * 3
    assert [message.sampling.seed for message in (first, *others)] == [5, 6, 7, 8]
    assert len(asked(deployment, PrefillRequest, "p")) == 1
    assert document["usage"]["completion_tokens"] == 4 * len(ANSWER)
    assert document["usage"]["prompt_tokens"] == len(first.prompt_token_ids)
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert await deployment.metric("disagg_decisions_total", reason="first_choice") == 3


async def test_every_prompt_of_a_completion_has_a_first_choice(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: ANSWER))
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 20}
    assert (await deployment.http.post("/v1/completions", json=body)).status_code == 200
    one, one_more, two, two_more = asked(deployment, GenerateRequest, "d")
    assert (one.fork_of, two.fork_of) == ("", "")
    assert (one_more.fork_of, two_more.fork_of) == (one.request_id, two.request_id)
    assert len(asked(deployment, PrefillRequest, "p")) == 2


async def test_a_choice_that_is_tried_again_stands_on_its_own(deploy):
    workers = ScriptedGateway(lambda _: ANSWER, decode=2)
    workers.workers["d0"].fail = ["broken"]
    workers.workers["d1"].fail = ["broken"]
    deployment = await deploy(workers)
    document = (await deployment.chat(n=3)).json()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["hello there"] * 3
    again = [message for message in asked(deployment, GenerateRequest, "d") if message.attempt]
    assert again
    assert {message.fork_of for message in again} == {""}


LONG = ServedModel(name="tiny", max_context_tokens=131_072, created=0, fingerprint="fp")


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": [5] * 131_000, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 131_000}]}),
    ],
)
async def test_a_long_prompt_has_fewer_choices(deploy, path, prompt):
    """Each takes the prompt to its worker, whose link is given up where too much waits in it."""
    deployment = await deploy(ScriptedGateway(lambda _: ANSWER), LONG)
    response = await deployment.http.post(path, json={"model": "tiny", "n": 33, **prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "n"
    assert "32 are possible" in response.json()["error"]["message"]
    assert not asked(deployment, GenerateRequest, "d")
    response = await deployment.http.post(path, json={"model": "tiny", "n": 32, **prompt})
    assert response.status_code == 200, response.text
    assert len(asked(deployment, GenerateRequest, "d")) == 32


async def test_a_large_schema_has_fewer_choices(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: ANSWER), LONG, HarmonyFormatter())
    schema = {"type": "object", "properties": {"x": {"enum": ["y" * 60_000]}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": schema}}
        for i in range(4)
    ]
    for n, status in ((128, 400), (1, 200)):
        response = await deployment.chat(tools=tools, n=n)
        assert response.status_code == status, response.text
        assert len(asked(deployment, GenerateRequest, "d")) == (status == 200)
        assert status == 200 or response.json()["error"]["param"] == "n"


async def test_biases_are_bounded(deploy):
    """Those of a whole vocabulary, for many choices, would be hundreds of megabytes."""
    deployment = await deploy(ScriptedGateway(lambda _: ANSWER), LONG, HarmonyFormatter())
    biases = {str(i): 0.5 for i in range(MAX_LOGIT_BIASES)}
    response = await deployment.chat(n=128, logit_bias={**biases, "200000": 0.5})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "logit_bias"
    assert not asked(deployment, GenerateRequest, "d")
    assert (await deployment.chat(n=128, logit_bias=biases)).status_code == 200
    sent = asked(deployment, GenerateRequest, "d")
    assert [len(message.sampling.logit_bias) for message in sent] == [MAX_LOGIT_BIASES] * 128


def test_what_one_request_sends_fits_into_a_link_several_times():
    biases = tuple((201_087 - i, -99.5) for i in range(MAX_LOGIT_BIASES))
    sampling = SamplingParams(max_tokens=131_072, seed=1 << 62, logit_bias=biases)
    prompt = [201_087] * (MAX_SENT_BYTES // MAX_CHOICES // 5)
    one = encode(GenerateRequest("chatcmpl-0", 0, prompt, [], sampling))
    assert 2 * MAX_CHOICES * len(one) < LinkSettings().max_unacknowledged_bytes
