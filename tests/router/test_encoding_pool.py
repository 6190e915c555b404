"""Long requests are encoded beside the event loop: same results, bounded, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from antiphon.router import encoding_pool
from antiphon.router.byte_format import ByteFormatter
from antiphon.router.conversation import ChatMessage, Conversation, MessageRole
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.encoding_pool import EncodingCrashed, EncodingPool
from antiphon.router.encoding_process import Outcome
from antiphon.router.formatter import ChatFormatter
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.openai.errors import ApiError, method_not_allowed
from antiphon.router.openai.prompts import render
from antiphon.router.served_model import ServedModel

LONG = encoding_pool.INLINE_CHARACTERS + 1
ROOMY = ServedModel(name="tiny", max_context_tokens=100_000, created=1, fingerprint="fp")


def words(characters: int) -> str:
    letters = random.Random(7)
    some = ["".join(letters.choices("abcdefghij", k=letters.randint(2, 9))) for _ in range(2000)]
    return " ".join(letters.choices(some, k=characters // 5))[:characters]


@contextmanager
def pool_of(formatter: ChatFormatter, processes: int = 1, **settings: int):
    pool = EncodingPool(formatter, processes, **settings)
    try:
        yield pool
    finally:
        pool.close()


class Deadly(ByteFormatter):
    """Ends the process that gets it."""

    def __reduce__(self):
        return os._exit, (3,)


class Loaded(ByteFormatter):
    """Leaves a file where it has been used in another process."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def encode(self, text: str) -> list[int]:
        Path(self._file).touch()
        return super().encode(text)


def children() -> set[int]:
    """Processes of pools of this process."""
    mine = psutil.Process().children()
    return {child.pid for child in mine if "encoding_process" in " ".join(child.cmdline())}


async def test_the_tokens_of_a_stream_come_while_megabytes_are_encoded(deploy, until):
    """The bound is relative to what encoding takes here and now, which is what the loop was held for."""
    formatter = HarmonyFormatter()
    text = words(4_000_000)
    began = time.perf_counter()
    token_ids = formatter.encode(text)
    alone_s = time.perf_counter() - began
    answer = formatter.vocabulary.encode_marked("<|channel|>final<|message|>" + "word " * 10_000)
    workers = ScriptedGateway(lambda _: answer)
    workers.step_s = 0.005
    deployment = await deploy(workers, ROOMY, formatter)
    arrivals = []

    async def stream() -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with deployment.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"content"' in line:
                    arrivals.append(time.perf_counter())

    body = json.dumps({"prompt": text}).encode()
    streaming = asyncio.create_task(stream())
    async with asyncio.timeout(60):
        await until(lambda: len(arrivals) > 9, seconds=30)
        sent_at = time.perf_counter()
        response = await deployment.http.post("/tokenize", content=body)
        answered_at = time.perf_counter()
    assert not streaming.done()
    streaming.cancel()
    during = [at for at in arrivals if sent_at <= at <= answered_at]
    longest_gap_s = max(after - before for before, after in itertools.pairwise(during))
    assert len(during) > 20
    assert longest_gap_s < alone_s / 3
    assert response.json()["tokens"] == token_ids


@pytest.mark.parametrize("formatter", [HarmonyFormatter, ByteFormatter])
async def test_a_prompt_is_the_same_from_a_process(formatter):
    here = formatter()
    conversation = Conversation((ChatMessage(MessageRole.USER, words(2 * LONG)),))
    with pool_of(here) as pool:
        assert await pool.run(LONG, render, conversation) == here.render(conversation)


@pytest.mark.parametrize("processes", [0, 2])
async def test_every_endpoint_answers_long_requests_alike(deploy, processes):
    deployment = await deploy(model=ROOMY, encoding_processes=processes)
    text = words(5 * LONG)
    tokens = list(text.encode())
    seen = {}
    for path, fields in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
        "/v1/completions": {"prompt": [text, "a", text]},
        "/tokenize": {"prompt": text},
        "/detokenize": {"tokens": tokens},
    }.items():
        response = await deployment.http.post(path, json={"model": "tiny", **fields})
        assert response.status_code == 200, response.text
        seen[path] = response.json()
    assert seen["/tokenize"]["tokens"] == tokens
    assert seen["/detokenize"]["prompt"] == text
    assert [choice["index"] for choice in seen["/v1/completions"]["choices"]] == [0, 1, 2]
    assert seen["/v1/chat/completions"]["usage"]["prompt_tokens"] > len(text)
    for path, fields, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * 9}]}, "messages"),
        ("/v1/responses", {"input": text * 9}, "input"),
        ("/v1/completions", {"prompt": text * 9}, "prompt"),
        ("/tokenize", {"prompt": text, "more": 1}, "more"),
        ("/detokenize", {"tokens": [*tokens, 1 << 30]}, f"tokens[{len(tokens)}]"),
    ):
        response = await deployment.http.post(path, json={"model": "tiny", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_processes_start_when_needed_and_end_with_the_router(deploy):
    before = children()
    deployment = await deploy(model=ROOMY)
    assert (await deployment.chat()).status_code == 200
    assert children() == before
    for _ in range(2):
        assert (await deployment.http.post("/tokenize", json={"prompt": words(LONG)})).status_code == 200
        assert len(children() - before) == 1
    await deployment.server.stop(drain=False)
    assert children() == before


async def test_a_process_that_was_warmed_has_the_formatter_already(tmp_path, until):
    loaded = tmp_path / "loaded"
    with pool_of(Loaded(str(loaded))) as pool:
        pool.warm()
        await until(loaded.exists, seconds=20)
        assert await pool.run(LONG, Loaded.encode, "one") == list(b"one")


async def test_a_process_that_died_is_replaced(deploy):
    before = children()
    deployment = await deploy(model=ROOMY, encoding_processes=1)
    for _ in range(3):
        response = await deployment.http.post("/tokenize", json={"prompt": words(LONG)})
        assert response.json()["count"] == LONG
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)


async def test_a_job_whose_process_dies_under_it_is_done_again(until):
    before = children()
    with pool_of(HarmonyFormatter()) as pool:
        text = words(50 * LONG)
        job = asyncio.create_task(pool.run(LONG, HarmonyFormatter.encode, text))
        await until(lambda: children() - before, seconds=20)
        (first,) = children() - before
        os.kill(first, signal.SIGKILL)
        assert await job == HarmonyFormatter().encode(text)
        assert first not in children()


async def test_a_process_that_cannot_live_ends_the_job_and_not_the_router():
    before = children()
    with pool_of(Deadly()) as pool, pytest.raises(EncodingCrashed, match="died"):
        await pool.run(LONG, Deadly.encode, "x")
    assert children() == before


async def test_a_formatter_that_cannot_go_to_a_process_is_told_at_the_start():
    ours = HarmonyFormatter(current_date=lambda: "2026-01-01")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        EncodingPool(ours, 1)
    with pool_of(ours, processes=0) as pool:
        assert await pool.run(LONG, HarmonyFormatter.encode, "one") == ours.encode("one")


async def test_what_a_crash_says_is_where_and_not_what():
    with pool_of(ByteFormatter()) as pool, pytest.raises(EncodingCrashed, match="AttributeError") as caught:
        await pool.run(LONG, getattr, "a client's text")
    assert "client" not in str(caught.value)


async def test_closing_ends_what_is_worked_on(until):
    before = children()
    pool = EncodingPool(HarmonyFormatter(), 1)
    job = asyncio.create_task(pool.run(LONG, HarmonyFormatter.encode, words(8_000_000)))
    await until(lambda: children() - before, seconds=20)
    await asyncio.to_thread(pool.close)
    with pytest.raises(EncodingCrashed):
        await job
    assert children() == before


@pytest.mark.parametrize(("gives_way_s", "order"), [(2e-6, [0, 3, 1, 2]), (0.0, [0, 1, 2, 3])])
async def test_what_is_short_goes_ahead_of_megabytes_for_a_while(monkeypatch, gives_way_s, order):
    monkeypatch.setattr(encoding_pool, "GIVES_WAY_S", gives_way_s)
    ended = []

    async def encode(number: int, text: str) -> None:
        assert await pool.run(len(text), ByteFormatter.encode, text) == list(text.encode())
        ended.append(number)

    texts = [words(20 * LONG), words(20 * LONG), words(20 * LONG), words(LONG)]
    with pool_of(ByteFormatter()) as pool:
        await asyncio.gather(*(encode(number, text) for number, text in enumerate(texts)))
    assert ended == order


async def test_who_leaves_while_waiting_leaves_the_turn_to_others():
    with pool_of(ByteFormatter()) as pool:
        jobs = [asyncio.create_task(pool.run(LONG, ByteFormatter.encode, str(n))) for n in range(4)]
        await asyncio.sleep(0)
        jobs[1].cancel()
        assert await jobs[3] == list(b"3")
        assert await jobs[2] == list(b"2")
        with pytest.raises(asyncio.CancelledError):
            await jobs[1]


async def test_too_much_that_waits_is_429(deploy, monkeypatch):
    monkeypatch.setattr(encoding_pool, "MAX_WAITING_JOBS", 1)
    deployment = await deploy(model=ROOMY, encoding_processes=1)
    body = json.dumps({"prompt": words(40 * LONG)}).encode()
    posts = [deployment.http.post("/tokenize", content=body) for _ in range(8)]
    statuses = [response.status_code for response in await asyncio.gather(*posts)]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    short = await deployment.http.post("/tokenize", json={"prompt": "short"})
    assert short.status_code == 200


class Gate:
    """Stands in for the processes of a pool: a job is at work until it is opened."""

    def __init__(self, pool: EncodingPool) -> None:
        self.opened, self.at_work = threading.Event(), []
        pool._call = self._answer

    def _answer(self, job: object) -> tuple[Outcome, object]:
        self.at_work.append(job)
        assert self.opened.wait(60)
        return Outcome.RESULT, job[1][0]


def idle(pool: EncodingPool, processes: int = 1) -> bool:
    return (pool._free, pool._waiting, pool._waiting_bytes) == (processes, [], 0)


async def test_the_bytes_that_wait_are_bounded(until):
    with pool_of(ByteFormatter(), max_waiting_bytes=1000) as pool:
        gate = Gate(pool)

        def job(name: str, held_bytes: int) -> asyncio.Task[str]:
            return asyncio.create_task(pool.run(LONG, getattr, name, held_bytes=held_bytes))

        first = job("at work", 5000)
        await until(lambda: gate.at_work, seconds=60)
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
        await until(lambda: idle(pool), seconds=60)


async def test_one_that_is_larger_than_the_bound_may_wait_alone(until):
    with pool_of(ByteFormatter(), max_waiting_bytes=1000) as pool:
        gate = Gate(pool)
        jobs = [asyncio.create_task(pool.run(LONG, getattr, name)) for name in ("at work", "waits")]
        await until(lambda: gate.at_work, seconds=60)
        with pytest.raises(ApiError):
            await pool.run(LONG, getattr, "waits too", held_bytes=1)
        gate.opened.set()
        assert await asyncio.gather(*jobs) == ["at work", "waits"]
        await until(lambda: idle(pool), seconds=60)


async def test_who_leaves_a_job_at_work_holds_its_process_until_it_is_done(until):
    """Else the jobs of clients that come and go would pile up before the threads, beyond every bound."""
    with pool_of(ByteFormatter()) as pool:
        gate = Gate(pool)
        gone = asyncio.create_task(pool.run(LONG, getattr, "gone"))
        await until(lambda: gate.at_work, seconds=60)
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
        await until(lambda: idle(pool), seconds=60)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/responses"])
async def test_bytes_that_wait_beyond_the_bound_are_429(deploy, path, until):
    deployment = await deploy(model=ROOMY, encoding_processes=1, encoding_max_waiting_bytes=1024)
    pool = deployment.server._context.encoding
    gate = Gate(pool)
    held = [asyncio.create_task(pool.run(LONG, getattr, "held")) for _ in range(2)]
    await until(lambda: gate.at_work and pool._waiting, seconds=60)
    text = words(40 * LONG)
    fields = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
    name = {"/tokenize": "prompt", "/v1/responses": "input"}.get(path, "messages")
    response = await deployment.http.post(path, json={"model": "tiny", name: fields[name]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    gate.opened.set()
    await asyncio.gather(*held)


def test_errors_of_the_api_survive_the_way():
    error = method_not_allowed("PUT", "GET")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ApiError)
    assert (copy.status, copy.headers, copy.body()) == (405, {"allow": "GET"}, error.body())


ROUTER = """
import asyncio
from antiphon.router.byte_format import ByteFormatter
from antiphon.router.encoding_pool import EncodingPool

async def main():
    pool = EncodingPool(ByteFormatter(), 1)
    await pool.run(1 << 20, ByteFormatter.encode, "x")
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_process_ends_when_its_router_is_killed():
    with subprocess.Popen([sys.executable, "-c", ROUTER], stdout=subprocess.PIPE) as router:
        try:
            assert router.stdout is not None
            assert router.stdout.readline() == b"up\n"
            (process,) = psutil.Process(router.pid).children()
        finally:
            router.kill()
    process.wait(20)
