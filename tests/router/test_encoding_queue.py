"""Long requests that wait for a process: so many, of so many bytes, and nothing left of those that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from antiphon.router import encoding_pool
from antiphon.router.byte_format import ByteFormatter
from antiphon.router.encoding_pool import EncodingPool
from antiphon.router.encoding_process import Outcome
from antiphon.router.openai.errors import ApiError
from antiphon.router.served_model import ServedModel

LONG = encoding_pool.INLINE_CHARACTERS + 1
ROOMY = ServedModel(name="tiny", max_context_tokens=100_000, created=1, fingerprint="fp")


@contextmanager
def one_process(**settings: int) -> Iterator[EncodingPool]:
    pool = EncodingPool(ByteFormatter(), 1, **settings)
    try:
        yield pool
    finally:
        pool.close()


class Gate:
    """Stands in for the processes of a pool: a job is at work until it is opened."""

    def __init__(self, pool: EncodingPool) -> None:
        self.opened, self.at_work, self._pool = threading.Event(), [], pool
        pool._call = self._answer

    def leave(self) -> None:
        """Jobs go to the processes again."""
        del self._pool._call

    def _answer(self, job: object) -> tuple[Outcome, object]:
        self.at_work.append(job)
        assert self.opened.wait(60)
        return Outcome.RESULT, job[1][0]


def idle(pool: EncodingPool, processes: int = 1) -> bool:
    return (pool._free, pool._waiting, pool._waiting_bytes) == (processes, [], 0)


async def test_too_much_that_waits_is_429(deploy, monkeypatch, until):
    monkeypatch.setattr(encoding_pool, "MAX_WAITING_JOBS", 1)
    deployment = await deploy(model=ROOMY, encoding_processes=1)
    pool = deployment.server._context.encoding
    gate = Gate(pool)
    held = [asyncio.create_task(pool.run(LONG, getattr, "held")) for _ in range(2)]
    await until(lambda: gate.at_work and pool._waiting)
    body = {"prompt": "word " * LONG}
    refused = await asyncio.gather(*(deployment.http.post("/tokenize", json=body) for _ in range(3)))
    assert [response.status_code for response in refused] == [429] * 3
    short = await deployment.http.post("/tokenize", json={"prompt": "short"})
    assert short.status_code == 200
    gate.opened.set()
    assert await asyncio.gather(*held) == ["held"] * 2
    await until(lambda: idle(pool))
    gate.leave()
    assert (await deployment.http.post("/tokenize", json=body)).status_code == 200


async def test_the_bytes_that_wait_are_bounded(until):
    with one_process(max_waiting_bytes=1000) as pool:
        gate = Gate(pool)

        def job(name: str, held_bytes: int) -> asyncio.Task[str]:
            return asyncio.create_task(pool.run(LONG, getattr, name, held_bytes=held_bytes))

        first = job("at work", 5000)
        await until(lambda: gate.at_work)
        waiting = [job("a", 600), job("b", 400)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await job("one byte too many", 1)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
        waiting.pop().cancel()
        await asyncio.sleep(0)
        waiting += [job("c", 400)]  # in the place of the one that left
        await asyncio.sleep(0)
        gate.opened.set()
        assert await asyncio.gather(first, *waiting) == ["at work", "a", "c"]
        assert await job("larger than all that may wait", 5000)
        await until(lambda: idle(pool))


async def test_one_that_is_larger_than_the_bound_may_wait_alone(until):
    with one_process(max_waiting_bytes=1000) as pool:
        gate = Gate(pool)
        jobs = [asyncio.create_task(pool.run(LONG, getattr, name)) for name in ("at work", "waits")]
        await until(lambda: gate.at_work)
        with pytest.raises(ApiError):
            await pool.run(LONG, getattr, "waits too", held_bytes=1)
        gate.opened.set()
        assert await asyncio.gather(*jobs) == ["at work", "waits"]
        await until(lambda: idle(pool))


async def test_who_leaves_a_job_at_work_holds_its_process_until_it_is_done(until):
    """Else the jobs of clients that come and go would pile up before the threads, beyond every bound."""
    with one_process() as pool:
        gate = Gate(pool)
        gone = asyncio.create_task(pool.run(LONG, getattr, "gone"))
        await until(lambda: gate.at_work)
        gone.cancel()
        for _ in range(20):
            leaves = asyncio.create_task(pool.run(LONG, getattr, "leaves"))
            await asyncio.sleep(0)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
        stays = asyncio.create_task(pool.run(LONG, getattr, "stays"))
        await asyncio.sleep(0)
        assert pool._threads._work_queue.qsize() == 0
        assert (len(pool._waiting), pool._waiting_bytes) == (1, LONG)
        gate.opened.set()
        assert await stays == "stays"
        assert gone.cancelled()
        assert [job[1][0] for job in gate.at_work] == ["gone", "stays"]
        await until(lambda: idle(pool))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/responses"])
async def test_bytes_that_wait_beyond_the_bound_are_429(deploy, path, until):
    deployment = await deploy(model=ROOMY, encoding_processes=1, encoding_max_waiting_bytes=1024)
    pool = deployment.server._context.encoding
    gate = Gate(pool)
    held = [asyncio.create_task(pool.run(LONG, getattr, "held")) for _ in range(2)]
    await until(lambda: gate.at_work and pool._waiting)
    text = "word " * (8 * LONG)
    fields = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
    name = {"/tokenize": "prompt", "/v1/responses": "input"}.get(path, "messages")
    response = await deployment.http.post(path, json={"model": "tiny", name: fields[name]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    gate.opened.set()
    await asyncio.gather(*held)
