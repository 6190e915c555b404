"""Streams whose engine fails: each says so, ends once, and never passes for a whole answer."""

from __future__ import annotations

import datetime
import json

import openai
import pytest
from openai.types.responses import Response

from antiphon.protocol.messages import Finish, FinishReason, RequestRefused
from antiphon.router.byte_format import CONTENT, REASONING, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter

ANSWER = byte_answer((REASONING, "think"), (CONTENT, "x" * 60))
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/completions": {"prompt": "hi", "max_tokens": 100},
}


class FailingLater(ScriptedGateway):
    """Its decode worker fails after ``good_batches`` steps, so many times."""

    good_batches = 12
    failures = 1_000

    def _batch(self, worker, *outputs):
        super()._batch(worker, *outputs)
        if worker.batches >= self.good_batches and self.failures and not worker.fail:
            self.failures -= 1
            worker.fail = ["out of memory"]


def events_of(text: str) -> list[dict]:
    lines = [line for block in text.split("\n\n") for line in block.splitlines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture
async def failing(deploy):
    return await deploy(FailingLater(lambda _: ANSWER), max_attempts=2)


async def test_before_the_first_byte_it_is_a_status(deploy):
    workers = ScriptedGateway(lambda _: ANSWER)
    deployment = await deploy(workers, max_attempts=1)
    for path, body in BODIES.items():
        for stream in (False, True):
            workers.workers["d0"].fail = ["out of memory"]
            response = await deployment.http.post(path, json={"model": "tiny", "stream": stream, **body})
            assert response.status_code == 500, path
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "server_error")
            # What went wrong inside is for the log.
            assert "memory" not in response.text


async def test_a_worker_that_crashes_on_a_request_fails_it(deploy):
    def crash(_) -> list[int]:
        raise LookupError("no such weight")

    deployment = await deploy(ScriptedGateway(crash), max_attempts=2)
    response = await deployment.chat()
    assert response.status_code == 500
    assert "weight" not in response.text
    assert len([m for m in deployment.workers.workers["d0"].sent if hasattr(m, "sampling")]) == 2
    assert not deployment.server.open_requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_after_it_an_event_with_the_same_body(failing, path):
    response = await failing.http.post(path, json={"model": "tiny", "stream": True, **BODIES[path]})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    events = events_of(response.text)
    assert len([event for event in events if "error" in event]) == 1
    assert set(events[-1]) == {"error"}
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert events[-1]["error"]["code"] == "server_error"
    assert not any(choice["finish_reason"] for e in events[:-1] for choice in e["choices"])


async def test_the_sdk_raises_it(failing):
    stream = await failing.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="attempt"):
        [chunk async for chunk in stream]


async def test_a_response_fails_with_what_there_was(failing):
    response = await failing.http.post("/v1/responses", json={"model": "tiny", "stream": True, "input": "hi"})
    events = events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert not any(event["type"] == "response.completed" for event in events)
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert failed["output"][0]["content"][0]["text"] == "think"
    assert failed["output"][-1]["status"] == "incomplete"
    # It is not kept: nothing can go on from half an answer.
    read = await failing.http.get(f"/v1/responses/{failed['id']}")
    assert read.status_code == 404


@pytest.mark.parametrize(
    ("reason", "code", "failure"),
    [
        (FinishReason.GRAMMAR, "grammar_failed", "invalid_prompt"),
        (FinishReason.DEADLINE, "timeout", "server_error"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_what_ends_an_answer_in_its_middle_is_told_by_its_own_name(deploy, path, reason, code, failure):
    class EndsLater(ScriptedGateway):
        def _batch(self, worker, *outputs):
            super()._batch(worker, *outputs)
            if worker.batches == 12:
                worker.ends = [Finish(reason, error="as the script says")]

    deployment = await deploy(EndsLater(lambda _: ANSWER))
    response = await deployment.http.post(path, json={"model": "tiny", "stream": True, **BODIES[path]})
    last = events_of(response.text)[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == failure
        # A code that the client's own types know.
        Response.model_validate(last["response"], strict=True)
    else:
        assert last["error"]["code"] == code


@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_that_no_worker_can_hold_is_named_as_the_request_names_it(deploy, path):
    deployment = await deploy()
    deployment.workers.workers["d0"].refuse = [RequestRefused("", 0, "larger than the cache", False)]
    response = await deployment.http.post(path, json={"model": "tiny", **BODIES[path]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(BODIES[path]))


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_exact_when_an_attempt_was_lost(deploy, stream):
    harmony = HarmonyFormatter(current_date=datetime.date(2025, 6, 28).isoformat)
    thought = "Let me think about this for a while, since it is not easy at all."
    answer = harmony.vocabulary.encode_marked(
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello 👨‍👩‍👧‍👦 there<|return|>"
    )

    workers = FailingLater(lambda _: answer)
    workers.failures = 1
    workers.cached_tokens = 32
    deployment = await deploy(workers, formatter=harmony)
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await deployment.chat(**fields)
    if stream:
        *chunks, usage_chunk = events_of(response.text)
        assert response.text.endswith("data: [DONE]\n\n")
        assert usage_chunk["choices"] == []
        usage = usage_chunk["usage"]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    else:
        usage = response.json()["usage"]
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Hello 👨‍👩‍👧‍👦 there"
    prompt = workers.workers["d0"].sent[0].prompt_token_ids
    assert usage == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(answer),
        "total_tokens": len(prompt) + len(answer),
        "prompt_tokens_details": {"cached_tokens": 32},
        "completion_tokens_details": {"reasoning_tokens": len(harmony.encode(thought))},
    }
    assert await deployment.metric("retries_total", leg="decode") == 1
