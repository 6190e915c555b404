"""Which worker is asked for what: the order of the legs; workers that are full, draining or not needed."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.protocol.messages import (
    AbortRequest,
    GenerateRequest,
    PrefillRequest,
    RequestRefused,
)
from antiphon.router.byte_format import CONTENT, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway

TEXT = "The quick brown fox jumps over the lazy dog."


def workers_saying(text: str = TEXT, **counts: int) -> ScriptedGateway:
    return ScriptedGateway(lambda _: byte_answer((CONTENT, text)), **counts)


def content_of(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def sent(workers: ScriptedGateway, worker_id: str, kind: type):
    return [message for message in workers.workers[worker_id].sent if isinstance(message, kind)]


def refusal(retryable: bool = True) -> RequestRefused:
    return RequestRefused("", 0, "queue full" if retryable else "larger than the cache", retryable)


async def test_order_of_the_legs(deploy):
    deployment = await deploy(workers_saying())
    assert content_of(await deployment.chat()) == TEXT
    (generate,) = sent(deployment.workers, "d0", GenerateRequest)
    (prefill,) = sent(deployment.workers, "p0", PrefillRequest)
    assert prefill.token_ids == generate.prompt_token_ids
    assert prefill.ticket.kv_tokens == len(generate.prompt_token_ids) - 1
    assert deployment.workers.workers["d0"].acknowledged == len(TEXT) + 2
    assert not sent(deployment.workers, "d0", AbortRequest)


async def test_prefill_is_chosen_only_after_the_reservation(deploy, until):
    deployment = await deploy(workers_saying())
    deployment.workers.workers["d0"].hold = True
    answer = asyncio.create_task(deployment.chat())
    await until(lambda: deployment.workers.workers["d0"].held)
    assert not deployment.workers.workers["p0"].sent
    deployment.workers.go_on("d0")
    assert content_of(await answer) == TEXT


async def test_a_prefill_worker_that_lost_its_decode_worker_is_not_asked_until_it_reports_it_again(
    deploy, until
):
    workers = workers_saying(prefill=2)
    deployment = await deploy(workers, max_attempts=3)
    for worker_id in ("p0", "p1"):
        workers.workers[worker_id].fail = ["handshake"]
    begun = asyncio.create_task(deployment.chat())
    await until(lambda: all(sent(workers, p, PrefillRequest) for p in ("p0", "p1")))
    await asyncio.sleep(0.05)
    assert [len(sent(workers, p, PrefillRequest)) for p in ("p0", "p1")] == [1, 1]
    assert (await deployment.chat()).status_code == 503  # nobody is left for a new one
    workers.report()
    assert content_of(await begun) == TEXT
    assert sum(len(sent(workers, p, PrefillRequest)) for p in ("p0", "p1")) == 3


async def test_full_decode_worker_is_passed_over(deploy):
    workers = workers_saying(decode=2)
    for name in ("d0", "d1"):
        workers.workers[name].refuse = [refusal()]
    deployment = await deploy(workers)
    response = await deployment.chat()
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(response.headers["retry-after"]) >= 1
    workers.workers["d0"].refuse = [refusal()]
    assert content_of(await deployment.chat()) == TEXT


async def test_who_is_passed_on_by_a_full_worker_is_no_more_urgent_at_the_next(deploy):
    workers = workers_saying(decode=2)
    workers.workers["d0"].refuse = [refusal()]
    deployment = await deploy(workers)
    assert content_of(await deployment.chat(priority=3)) == TEXT
    asked = sent(workers, "d0", GenerateRequest) + sent(workers, "d1", GenerateRequest)
    assert [message.priority for message in asked] == [3, 3]
    assert [message.priority for message in sent(workers, "p0", PrefillRequest)] == [3]


async def test_full_prefill_worker_is_asked_again(deploy):
    workers = workers_saying()
    workers.workers["p0"].refuse = [refusal(), refusal()]
    deployment = await deploy(workers)
    assert content_of(await deployment.chat()) == TEXT
    assert len(sent(workers, "p0", PrefillRequest)) == 3
    assert len(sent(workers, "d0", GenerateRequest)) == 1


async def test_a_worker_with_much_on_its_way_is_asked_later_and_is_not_suspected(deploy, until):
    workers = workers_saying(decode=2)
    deployment = await deploy(workers)
    for name in ("d0", "d1"):
        workers.workers[name].backlogged = True
    for _ in range(8):  # as many failures would have opened a circuit
        assert (await deployment.chat()).status_code == 429
    workers.workers["d1"].backlogged = False
    assert content_of(await deployment.chat()) == TEXT
    workers.workers["d0"].backlogged, workers.workers["d1"].backlogged = False, True
    assert content_of(await deployment.chat()) == TEXT
    workers.workers["p0"].backlogged = True
    begun = asyncio.create_task(deployment.chat())
    await until(lambda: len(sent(workers, "d0", GenerateRequest)) == 2)
    assert not begun.done()
    workers.workers["p0"].backlogged = False
    assert content_of(await begun) == TEXT


async def test_what_is_computed_again_gets_through_to_a_worker_with_much_on_its_way(deploy, until):
    workers = workers_saying(decode=2)
    workers.step_s = 0.02
    deployment = await deploy(workers)
    begun = asyncio.create_task(deployment.chat())
    await until(lambda: any(worker.batches > 3 for worker in workers.workers.values()))
    mine = next(name for name in ("d0", "d1") if sent(workers, name, GenerateRequest))
    (other,) = {"d0", "d1"} - {mine}
    workers.workers[other].backlogged = True
    workers.kill(mine)
    assert content_of(await begun) == TEXT
    (again,) = sent(workers, other, GenerateRequest)
    assert again.attempt > 0
    assert again.output_token_ids


@pytest.mark.parametrize("worker", ["p0", "d0"])
async def test_what_never_fits_is_the_clients_error(deploy, worker):
    workers = workers_saying()
    workers.workers[worker].refuse = [refusal(retryable=False)]
    deployment = await deploy(workers)
    response = await deployment.chat()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "larger than the cache" in response.json()["error"]["message"]
    assert not workers.workers["d0"].requests


async def test_draining_workers_get_nothing_new(deploy):
    workers = workers_saying(decode=2)
    deployment = await deploy(workers)
    workers.workers["d0"].draining = True
    workers.report()
    for _ in range(3):
        assert content_of(await deployment.chat()) == TEXT
    assert not sent(workers, "d0", GenerateRequest)
    workers.workers["d1"].draining = True
    workers.report()
    assert (await deployment.http.get("/ready")).status_code == 503


async def test_one_token_prompt_needs_no_prefill(deploy, monkeypatch):
    workers = workers_saying()
    deployment = await deploy(workers)
    original = type(deployment.server._formatter).render

    def short(self, conversation):
        prompt = original(self, conversation)
        del prompt.token_ids[1:]
        return prompt

    monkeypatch.setattr("antiphon.router.byte_format.ByteFormatter.render", short)
    assert content_of(await deployment.chat()) == TEXT
    assert not sent(workers, "p0", PrefillRequest)
    assert await deployment.metric("disagg_decisions_total", decision="no_prefill") == 1
