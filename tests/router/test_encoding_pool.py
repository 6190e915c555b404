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
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from antiphon.router import encoding_pool
from antiphon.router.byte_format import ByteFormatter
from antiphon.router.conversation import ChatMessage, Conversation, MessageRole
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.encoding_pool import EncodingCrashed, EncodingPool
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


class Stuck(ByteFormatter):
    """Holds the first process that encodes with it for good, and leaves a file as a sign of that."""

    def __init__(self, sign: Path) -> None:
        super().__init__()
        self._sign = sign

    def encode(self, text: str) -> list[int]:
        if not self._sign.exists():
            self._sign.touch()
            time.sleep(3600)
        return super().encode(text)


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
    """Processes of pools of this process, dead ones left out."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "encoding_process" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


async def test_the_tokens_of_a_stream_come_while_megabytes_are_encoded(deploy, until):
    """The bound is relative to what encoding takes here and now, which is what the loop was held for.

    Both are what this process computed, so that it does not matter for how long others were let run.
    """
    before = children()
    formatter = HarmonyFormatter()
    text = words(2_000_000)
    began = time.process_time()
    token_ids = formatter.encode(text)
    alone_s = time.process_time() - began
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
                    arrivals.append(time.process_time())

    deployment.server.warm_encoding()
    await until(lambda: children() - before)
    (process,) = children() - before
    body = json.dumps({"prompt": text}).encode()
    streaming = asyncio.create_task(stream())
    await until(lambda: len(arrivals) > 9)
    begun = len(arrivals)
    os.kill(process, signal.SIGSTOP)  # until tokens have come: it may be the only one that is let run
    answer = asyncio.create_task(deployment.http.post("/tokenize", content=body))
    await until(lambda: len(arrivals) > begun + 20)
    assert not answer.done()
    os.kill(process, signal.SIGCONT)
    response = await answer
    streaming.cancel()
    longest_gap_s = max(after - before for before, after in itertools.pairwise(arrivals[begun:]))
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
        await until(loaded.exists)
        assert await pool.run(LONG, Loaded.encode, "one") == list(b"one")


async def test_a_process_that_died_is_replaced(deploy):
    before = children()
    deployment = await deploy(model=ROOMY, encoding_processes=1)
    for _ in range(3):
        response = await deployment.http.post("/tokenize", json={"prompt": words(LONG)})
        assert response.json()["count"] == LONG
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)


async def test_a_job_whose_process_dies_under_it_is_done_again(until, tmp_path):
    before = children()
    begun = tmp_path / "begun"
    with pool_of(Stuck(begun)) as pool:
        job = asyncio.create_task(pool.run(LONG, Stuck.encode, "a text"))
        await until(begun.exists)
        (first,) = children() - before
        os.kill(first, signal.SIGKILL)
        assert await job == list(b"a text")
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


async def test_closing_ends_what_is_worked_on(until, tmp_path):
    before = children()
    begun = tmp_path / "begun"
    pool = EncodingPool(Stuck(begun), 1)
    job = asyncio.create_task(pool.run(LONG, Stuck.encode, "a text"))
    await until(begun.exists)
    await asyncio.to_thread(pool.close)
    with pytest.raises(EncodingCrashed):
        await job
    assert children() == before


@pytest.mark.parametrize(("gives_way_s", "order"), [(1.0, [0, 3, 1, 2]), (0.0, [0, 1, 2, 3])])
async def test_what_is_short_goes_ahead_of_megabytes_for_a_while(monkeypatch, gives_way_s, order):
    monkeypatch.setattr(encoding_pool, "GIVES_WAY_S", gives_way_s)
    ended = []

    async def encode(number: int, text: str) -> None:
        assert await pool.run(len(text), ByteFormatter.encode, text) == list(text.encode())
        ended.append(number)

    texts = [words(2 * LONG), words(2 * LONG), words(2 * LONG), words(LONG)]
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
    process.wait(60)
