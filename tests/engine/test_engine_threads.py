"""Commands from many threads while the engine thread steps."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from antiphon.engine.events import EngineEvent
from antiphon.engine.loop import EngineLoop
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.thread import EngineThread
from antiphon.protocol.messages import FinishReason

CLIENTS, REQUESTS = 4, 20


@pytest.mark.parametrize("mode", ["plain", "overlapped"])
def test_many_clients_at_once(kit: Any, mode: str) -> None:
    loop: EngineLoop = kit.engine(
        mode, kit.FakeModel(), kit.settings(full_pages=24, sliding_pages=24, max_queued_requests=8)
    )
    said, lock = kit.Transcript(), threading.Lock()
    failures: list[BaseException] = []
    requests: dict[str, Any] = {}
    aborted: set[str] = set()

    def hear(events: list[EngineEvent]) -> None:
        with lock:
            said.take(events)

    def client(number: int) -> None:
        rng = random.Random(number)
        for turn in range(REQUESTS):
            request = kit.request(
                f"c{number}-{turn}", kit.prompt_of(rng.randint(1, 60), rng.randint(0, 2)), max_tokens=12
            )
            while True:
                try:
                    loop.submit(request)
                    break
                except RequestRejected as error:
                    if not error.retryable:
                        raise
                    time.sleep(0.001)
            with lock:
                requests[request.request_id] = request
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.005)
                with lock:
                    aborted.add(request.request_id)
                loop.abort(request.request_id, 1)

    engine = EngineThread(loop, hear, failures.append)
    engine.start()
    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60.0)
    give_up = time.monotonic() + 60.0
    while len(said.finished) < CLIENTS * REQUESTS and not failures:
        assert time.monotonic() < give_up, loop.snapshot()
        time.sleep(0.005)
    assert engine.stop(60.0)
    assert not failures
    kit.run(loop, said)
    assert not kit.held_pages(loop)
    assert loop.snapshot().waiting == 0
    assert set(said.finished) == set(requests)
    model = kit.FakeModel()
    for request_id, request in requests.items():
        expected = model.expected(request)
        reason = said.finished[request_id].reason
        spoken = said.tokens.get(request_id, [])
        if request_id in aborted and reason is FinishReason.ABORT:
            assert spoken == expected[: len(spoken)]
        else:
            assert reason is FinishReason.LENGTH
            assert spoken == expected
