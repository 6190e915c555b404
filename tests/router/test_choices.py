"""Several choices of one prompt: at one decode worker, with one prefill, also when that worker dies."""

from __future__ import annotations

from typing import Any

from antiphon.protocol.messages import GenerateRequest, PrefillRequest
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway

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
