"""Workers that refuse, fail, stall and die: the client gets its text without a seam, or one error."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from antiphon.protocol.messages import (
    AbortRequest,
    GenerateRequest,
    PrefillFailed,
    PrefillRequest,
    Reserved,
)
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.generation import ATTEMPT_STRIDE
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway

TEXT = "The quick brown fox jumps over the lazy dog."


def workers_saying(text: str = TEXT, **counts: int) -> ScriptedGateway:
    return ScriptedGateway(lambda _: byte_answer((CONTENT, text)), **counts)


def content_of(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def sent(workers: ScriptedGateway, worker_id: str, kind: type):
    return [message for message in workers.workers[worker_id].sent if isinstance(message, kind)]


async def test_prefill_failure_starts_the_next_attempt(deploy):
    deployment = await deploy(workers_saying())
    deployment.workers.workers["p0"].fail = ["transfer", "compute"]
    assert content_of(await deployment.chat()) == TEXT
    attempts = [message.attempt for message in sent(deployment.workers, "d0", GenerateRequest)]
    assert attempts == [0, ATTEMPT_STRIDE, 2 * ATTEMPT_STRIDE]
    aborted = [message.attempt for message in sent(deployment.workers, "d0", AbortRequest)]
    assert aborted == [ATTEMPT_STRIDE - 1, 2 * ATTEMPT_STRIDE - 1]
    assert await deployment.metric("retries_total", leg="prefill", reason="transfer") == 1
    priorities = [message.priority for message in sent(deployment.workers, "d0", GenerateRequest)]
    assert priorities[1] < priorities[0]


async def test_attempts_are_bounded(deploy):
    deployment = await deploy(workers_saying(), max_attempts=2)
    deployment.workers.workers["p0"].fail = ["transfer"] * 5
    response = await deployment.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "server_error"
    assert len(sent(deployment.workers, "d0", GenerateRequest)) == 2
    assert not deployment.workers.workers["d0"].requests
    deployment.workers.workers["p0"].fail.clear()
    assert content_of(await deployment.chat()) == TEXT


async def test_decode_error_is_recomputed_from_what_was_emitted(deploy, until):
    workers = workers_saying(decode=2)
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat(seed=5))
    await until(lambda: any(w.batches > 10 for w in workers.workers.values()))
    victim = next(w for w in workers.workers.values() if w.batches)
    victim.fail = ["cuda error"]
    assert content_of(await answer) == TEXT
    requests = sent(workers, "d0", GenerateRequest) + sent(workers, "d1", GenerateRequest)
    first, second = sorted(requests, key=lambda message: message.attempt)
    assert first.output_token_ids == []
    assert second.output_token_ids == byte_answer((CONTENT, TEXT))[: len(second.output_token_ids)]
    assert len(second.output_token_ids) > 5
    assert second.sampling == first.sampling


@pytest.mark.parametrize("stream", [False, True])
async def test_dead_decode_worker_is_replaced_without_a_seam(deploy, stream, until):
    workers = workers_saying(decode=2)
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat(stream=stream))
    await until(lambda: any(w.batches > 10 for w in workers.workers.values()))
    workers.kill(next(i for i, w in workers.workers.items() if w.batches))
    response = await answer
    if stream:
        events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    else:
        assert content_of(response) == TEXT
        assert response.json()["usage"]["completion_tokens"] == len(TEXT) + 2
    assert await deployment.metric("retries_total", leg="decode", reason="worker_lost") == 1


async def test_only_decode_worker_dies_and_comes_back(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 10)
    workers.kill("d0")
    # A new request does not wait for a worker; the one that has begun does.
    assert (await deployment.chat()).status_code == 503
    assert not answer.done()
    workers.revive("d0")
    assert content_of(await answer) == TEXT


async def test_a_worker_that_does_not_come_back(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers, worker_replacement_wait_s=0.05)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 10)
    workers.kill("d0")
    response = await answer
    assert response.status_code == 503
    assert "died" in response.json()["error"]["message"]


async def test_dead_prefill_worker(deploy, until):
    workers = workers_saying(prefill=2)
    workers.workers["p0"].hold = workers.workers["p1"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held or workers.workers["p1"].held)
    victim, other = ("p0", "p1") if workers.workers["p0"].held else ("p1", "p0")
    workers.workers[other].hold = False
    workers.kill(victim)
    assert content_of(await answer) == TEXT
    assert sent(workers, other, PrefillRequest)[0].attempt == ATTEMPT_STRIDE


@pytest.mark.parametrize("end", ["dies", "fails"])
async def test_an_answer_that_has_begun_outlives_its_prefill(deploy, until, end):
    workers = workers_saying()
    workers.step_s = 0.002
    workers.workers["p0"].hold = True
    deployment = await deploy(workers, max_attempts=1)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    request = workers.workers["p0"].held[0]
    workers.kv_arrives(request)
    await until(lambda: workers.workers["d0"].batches > 5)
    if end == "dies":
        workers.kill("p0")
    else:
        workers.say("p0", PrefillFailed(request.request_id, request.attempt, "transfer", "late"))
    assert content_of(await answer) == TEXT
    assert len(sent(workers, "d0", GenerateRequest)) == 1
    assert not sent(workers, "d0", AbortRequest)
    assert await deployment.metric("retries_total") == 0


async def test_prefill_that_fails_after_its_worker_was_left_is_not_believed(deploy, until):
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    request = workers.workers["p0"].held[0]
    workers.say("p0", PrefillFailed(request.request_id, request.attempt, "transfer", "x"))
    await until(lambda: len(sent(workers, "p0", PrefillRequest)) == 2)
    workers.say("p0", PrefillFailed(request.request_id, request.attempt, "transfer", "late"))
    workers.go_on("p0")
    assert content_of(await answer) == TEXT
    assert await deployment.metric("retries_total") == 1


async def test_stale_tokens_are_not_believed(deploy, until):
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    request = workers.workers["p0"].held[0]
    workers.say("p0", PrefillFailed(request.request_id, 0, "transfer", "x"))
    await until(lambda: len(sent(workers, "p0", PrefillRequest)) == 2)
    workers.emit("d0", request.request_id, 0, 0, list(b"stale"))
    workers.go_on("p0")
    assert content_of(await answer) == TEXT


async def test_repeated_tokens_are_dropped_and_a_gap_is_recomputed(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 10)
    request_id = next(iter(workers.workers["d0"].requests))
    whole = byte_answer((CONTENT, TEXT))
    workers.emit("d0", request_id, 0, 0, whole[:3])
    workers.emit("d0", request_id, 0, 30, whole[30:32])
    assert content_of(await answer) == TEXT
    assert await deployment.metric("retries_total", reason="tokens_missing") == 1


async def test_lost_batch_recomputes_what_the_worker_held(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answers = [asyncio.create_task(deployment.chat()) for _ in range(3)]
    await until(lambda: workers.workers["d0"].batches > 10)
    workers.emit("d0", "nobody", 0, 0, [1], gap=2)
    for answer in answers:
        assert content_of(await answer) == TEXT
    assert await deployment.metric("retries_total", reason="tokens_missing") == 3


async def test_preemption_prefills_prompt_and_output_again(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 10)
    request_id, request = next(iter(workers.workers["d0"].requests.items()))
    emitted = workers.workers["d0"].batches
    workers.preempt("d0", request_id)
    assert content_of(await answer) == TEXT
    first, second = sent(workers, "p0", PrefillRequest)
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.token_ids == request.prompt_token_ids + byte_answer((CONTENT, TEXT))[:emitted]
    # A preemption is decode's business: no attempt of the router is used up and nothing is aborted.
    assert not sent(workers, "d0", AbortRequest)


async def test_both_sides_may_start_over_at_the_same_moment(deploy, until):
    """Decode reserved anew while the router, told by prefill, started its own next attempt."""
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    request = workers.workers["p0"].held[0]
    workers.workers["d0"].hold = True
    workers.say("p0", PrefillFailed(request.request_id, 0, "transfer", "x"))
    stale = msgspec.structs.replace(request.ticket, attempt=1)
    workers.say("d0", Reserved(request.request_id, 1, 0, stale, 0.0))
    await asyncio.sleep(0.02)
    # Nobody may be sent to write pages that decode is giving up.
    assert len(sent(workers, "p0", PrefillRequest)) == 1
    workers.workers["p0"].hold = False
    workers.go_on("d0")
    assert content_of(await answer) == TEXT
    assert sent(workers, "p0", PrefillRequest)[1].ticket.attempt == ATTEMPT_STRIDE


async def test_kv_that_never_comes_uses_up_the_attempts(deploy, until):
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers, max_attempts=3)
    answer = asyncio.create_task(deployment.chat())
    for count in (1, 2, 3):
        await until(lambda count=count: len(sent(workers, "p0", PrefillRequest)) == count)
        workers.preempt("d0", next(iter(workers.workers["d0"].requests)))
    assert (await answer).status_code == 500
    assert await deployment.metric("retries_total", leg="prefill", reason="kv_lost") == 2
    assert not workers.workers["d0"].requests


async def test_deadline_ends_both_legs(deploy, until, pass_time):
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers, request_timeout_s=30.0)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    pass_time(30.0)
    response = await answer
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert sent(workers, "p0", AbortRequest)
    assert sent(workers, "d0", AbortRequest)


async def test_deadline_after_the_first_byte_is_an_event(deploy, until, pass_time):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat(stream=True, timeout_s=30.0))
    await until(lambda: workers.workers["d0"].batches > 4)
    workers.step_s = 45.0  # the next token but one would come too late
    pass_time(30.0)
    response = await answer
    assert response.status_code == 200
    *_, last = [line[6:] for line in response.text.split("\n\n") if line]
    assert json.loads(last)["error"]["code"] == "timeout"
    assert "[DONE]" not in response.text
    assert not workers.workers["d0"].requests
    assert await deployment.metric("request_errors_total", error_type="timeout") == 1


async def test_last_tokens_before_a_preemption_may_come_after_it(deploy, until):
    workers = workers_saying()
    workers.workers["p0"].hold = True
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["p0"].held)
    request = workers.workers["p0"].held[0]
    whole = byte_answer((CONTENT, TEXT))
    workers.emit("d0", request.request_id, 0, 0, whole[:5])
    workers.preempt("d0", request.request_id)
    workers.emit("d0", request.request_id, 0, 5, whole[5:7])
    await until(lambda: len(sent(workers, "p0", PrefillRequest)) == 2)
    workers.go_on("p0")
    assert content_of(await answer) == TEXT


async def test_a_new_life_ends_the_old_one(deploy, until):
    workers = workers_saying()
    workers.step_s = 0.002
    deployment = await deploy(workers)
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: workers.workers["d0"].batches > 10)
    workers.revive("d0")  # nobody said that the first life was over
    assert content_of(await answer) == TEXT
    assert await deployment.metric("retries_total", leg="decode", reason="worker_lost") == 1
