"""Random schedules of what can go wrong: every answer whole, every end single, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from antiphon.configs.front_end import RouterConfig
from antiphon.protocol.messages import RequestRefused, SamplingParams
from antiphon.router.dispatch.dispatcher import Dispatcher
from antiphon.router.dispatch.generation import Generation, GenerationEnded, OutputChannel, TokensArrived
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.lifecycle import EndKind
from antiphon.router.metrics import RouterMetrics

ANSWER = list(range(1000, 1040))


def one_fault(rng: random.Random, gateway: ScriptedGateway) -> None:
    """Something goes wrong somewhere."""
    name = rng.choice(sorted(gateway.workers))
    worker = gateway.workers[name]
    decode = name.startswith("d")
    request_id = rng.choice(sorted(worker.requests)) if worker.requests else None
    match rng.randrange(10):
        case 0 if worker.up:
            gateway.kill(name)
        case 0 | 1 if not worker.up:
            gateway.revive(name)
        case 1 | 2:
            worker.fail.append("transfer")
        case 3:
            worker.refuse.append(RequestRefused("", 0, "full", True))
        case 4 if decode and request_id:
            gateway.preempt(name, request_id)
        case 5 if decode and request_id:  # a repeat, or tokens of an attempt that is over
            attempt = worker.requests[request_id].attempt - rng.randrange(2)
            gateway.emit(name, request_id, attempt, 0, ANSWER[: min(3, worker.progress[request_id])])
        case 6 if decode and worker.up:  # a batch of the link is lost
            gateway.emit(name, "nobody", 0, 0, [1], gap=1)
        case 7:
            worker.hold = not worker.hold
            if not worker.hold:
                gateway.go_on(name)
        case 8 if worker.held and not decode:  # decode has its KV before prefill has said anything
            gateway.kv_arrives(rng.choice(worker.held))
        case _:
            gateway.report()


def calm(gateway: ScriptedGateway) -> None:
    """Everything works again."""
    for name, worker in list(gateway.workers.items()):
        worker.fail.clear()
        worker.refuse.clear()
        if not worker.up:
            gateway.revive(name)
        gateway.go_on(name)
    gateway.report()


async def read(channel: OutputChannel) -> tuple[list[int], GenerationEnded]:
    """All tokens and the end; whatever comes after the end fails the test."""
    tokens: list[int] = []
    while True:
        await channel.wait()
        event = channel.take_ready()
        if isinstance(event, TokensArrived):
            tokens += event.token_ids
        elif isinstance(event, GenerationEnded):
            return tokens, event


@pytest.mark.parametrize("seed", range(60))
async def test_answers_survive_every_schedule(seed):
    rng = random.Random(seed)
    gateway = ScriptedGateway(lambda _: ANSWER, prefill=2, decode=2)
    gateway.step_s = 0.0005
    gateway.tokens_per_step = rng.choice([1, 3])
    config = RouterConfig(max_attempts=1000)
    dispatcher = Dispatcher(gateway, config, 16, RouterMetrics("tiny"))
    await gateway.start(dispatcher)
    generations = []
    readers = []
    for i in range(6):
        channel = OutputChannel()
        sampling = SamplingParams(max_tokens=100, seed=i)
        now = time.monotonic()
        prompt = [rng.randrange(1000) for _ in range(rng.choice([1, 2, 40]))]
        generation = Generation(f"g{i}", 0, prompt, sampling, channel, now, now + 600)
        generations.append(generation)
        readers.append(asyncio.create_task(read(channel)))
        dispatcher.submit(generation)
        for _ in range(rng.randrange(8)):
            one_fault(rng, gateway)
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
    victim = rng.choice(generations)
    dispatcher.abandon(victim, EndKind.CLIENT_GONE)
    calm(gateway)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*readers)
    await asyncio.sleep(0.002)
    for generation, (tokens, end) in zip(generations, answers, strict=True):
        if end.kind is EndKind.STOP:
            assert tokens == ANSWER
        else:
            # Turned away at the door, or left: what came until then is a beginning of the answer.
            at_the_door = (EndKind.NO_WORKER, EndKind.OVERLOADED)
            assert generation is victim or (end.kind in at_the_door and not tokens), end
            assert tokens == ANSWER[: len(tokens)]
        assert generation.channel.take_ready() is None
    assert dispatcher.open_generations == 0
    for name, worker in gateway.workers.items():
        assert not worker.requests, name
        assert not dispatcher.fleet.get(name).own_requests, name
    await gateway.close()
