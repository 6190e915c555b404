"""Scenes that bring one request to a state, on either side, and keep it there until ``let_go``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router_stand_in import wait_until

from antiphon.decode_worker.receiver import ReceiveState
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.prefill_worker.jobs import JobState
from antiphon.protocol.messages import AbortRequest

Start = Callable[..., tuple[Any, Any]]

PROMPT_TOKENS, OUTPUT_TOKENS = 90, 12


def until(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, what=what)


@dataclass
class Scene:
    """One request that is kept in a state."""

    pair: Any
    router: Any
    network: InProcessNetwork
    name: str
    let_go: Callable[[], None]
    gates: list[threading.Event] = field(default_factory=list)

    @property
    def outcome(self) -> Any:
        return self.router.requests[self.name]

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.outcome.attempts[0]

    def release_writes(self) -> None:
        self.network._injections.clear()
        self.network.release_held()

    def drive(self, seconds: float = 60.0) -> None:
        """Until the request ends, see to it that somebody is asked for the prefill that it waits for."""
        deadline = time.monotonic() + seconds
        while not self.outcome.ended:
            assert time.monotonic() < deadline, self._described()
            self.router.thread.call(self._ask_again)
            time.sleep(0.05)

    def _described(self) -> str:
        outcome, router = self.outcome, self.router
        return (
            f"attempts {outcome.attempts}, {len(outcome.tokens)} tokens, {outcome.prefill_failures[-3:]}, "
            f"ticket {router.tickets.get(self.name)}, at {router.prefilling.get(self.name)}, "
            f"linked to {router.node.peers()}, workers {self.pair.statuses()}"
        )

    def _ask_again(self) -> None:
        router, name = self.router, self.name
        ticket = router.tickets.get(name)
        asked = router.prefilling.get(name)
        at_work = asked is not None and router.node.is_up(asked)
        if ticket is not None and ticket.attempt == self.outcome.attempts[-1] and not at_work:
            router.hold_prefill = False
            router._prefill_again(name, ticket.attempt)


class Gate:
    """Keeps a fake model in the middle of a forward pass, after so many layers from now on."""

    def __init__(self, model: Any, layers: int = 1) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._model, self._layers = model, layers
        model.interrupt = self._after_layer

    def _after_layer(self) -> None:
        self._layers -= 1
        if self._layers > 0:
            self._model.interrupt = self._after_layer
            return
        self.reached.set()
        assert self.opened.wait(120)


class Slow:
    """Keeps every step of a fake model from ending for a while, until ``done``: none ends before its turn."""

    def __init__(self, model: Any, done: Callable[[], bool], layer_s: float = 0.02) -> None:
        self._model, self._done, self._layer_s = model, done, layer_s
        model.interrupt = self._wait

    def _wait(self) -> None:
        if not self._done():
            self._model.interrupt = self._wait
            time.sleep(self._layer_s)


def overdue(decode: Any, times: int = 1) -> None:
    """Let a decode worker see that it waited in vain, so many times over: its clock is put forward.

    It asks for what is missing the first two times, tells the writer to stop the third time, and goes on
    without the writer's word the fourth time.
    """
    receiver = decode._dispatch.receiver

    def put_forward() -> None:
        for _ in range(times):  # with no message in between, which may renew the wait
            clock, ahead_s = receiver._clock, 1.01 * receiver._timeout_s
            receiver._clock = lambda clock=clock, ahead_s=ahead_s: clock() + ahead_s
            receiver.tick()

    decode._thread.call(put_forward)


def put_forward(engine: Any, seconds: float) -> None:
    """Put an engine's clock forward."""
    clock = engine._clock
    engine._clock = lambda: clock() + seconds


class Staging:
    """Builds scenes; each method is a state and returns once the request is in it."""

    def __init__(self, start: Start, deadline_s: float | None) -> None:
        self._start, self._deadline_s = start, deadline_s

    def _pair(self, **decode_settings: object) -> tuple[Any, Any, InProcessNetwork]:
        network = InProcessNetwork()
        pair, router = self._start(
            network.transport,
            decode_settings=decode_settings,
        )
        return pair, router, network

    def _ask(self, router: Any) -> str:
        prompt = router.random_prompt(PROMPT_TOKENS)
        return str(router.generate(prompt, max_tokens=OUTPUT_TOKENS, deadline_s=self._deadline_s))

    def decode_queued(self) -> Scene:
        pair, router, network = self._pair(max_reservations_waiting=1)
        router.hold_prefill = True
        before = router.generate(router.random_prompt(40))
        until(lambda: bool(router.requests[before].attempts), "the reservation before it")
        name = self._ask(router)
        until(lambda: pair.decode.status().waiting == 1, "a place in the queue")

        def let_go() -> None:
            router.hold_prefill = False
            pair.decode._thread.call(
                pair.decode._dispatch._on_abort, router.node.me, AbortRequest(before, 99, "test")
            )

        return Scene(pair, router, network, name, let_go)

    def decode_reserved(self) -> Scene:
        pair, router, network = self._pair()
        router.hold_prefill = True
        name = self._ask(router)
        until(lambda: router.requests[name].attempts == [1], "the reservation")
        return Scene(pair, router, network, name, lambda: None)

    def prefill_queued(self) -> Scene:
        pair, router, network = self._pair()
        gate = Gate(pair.models[0])
        router.generate(router.random_prompt(40))
        assert gate.reached.wait(60)
        name = self._ask(router)
        scene = Scene(pair, router, network, name, gate.opened.set)
        self._until_job(scene, JobState.QUEUED)
        return scene

    def prefill_announced(self) -> Scene:
        pair, router, network = self._pair()
        receiver, announced = pair.decode._dispatch.receiver, []
        receiver.on_announce = lambda *arguments: announced.append(arguments)
        name = self._ask(router)

        def let_go() -> None:
            del receiver.on_announce
            if pair.decode._dispatch.receiver is receiver:  # else its worker is another life by now
                for arguments in announced:
                    pair.decode._thread.call(receiver.on_announce, *arguments)

        scene = Scene(pair, router, network, name, let_go)
        self._until_job(scene, JobState.ANNOUNCED)
        until(lambda: bool(announced), "the announcement")
        return scene

    def decode_receiving(self) -> Scene:
        pair, router, network = self._pair()
        network.inject(Fault.HOLD, count=100)
        name = self._ask(router)
        scene = Scene(pair, router, network, name, lambda: None)
        scene.let_go = scene.release_writes
        until(lambda: network.held > 0, "a write")
        return scene

    def decode_stopping(self) -> Scene:
        scene = self.decode_receiving()
        overdue(scene.pair.decode, 3)
        self._until_receive(scene, ReceiveState.STOPPING)
        return scene

    def decode_abandoned(self) -> Scene:
        scene = self.decode_receiving()
        scene.router.hold_prefill = True
        overdue(scene.pair.decode, 4)
        self._until_receive(scene, ReceiveState.ABANDONED)
        until(lambda: scene.outcome.attempts == [1, 2], "other pages")
        return scene

    def prefill_ending(self) -> Scene:
        scene = self.decode_receiving()
        scene.router.hold_prefill = True
        scene.router.abort_at("prefill-0", scene.name, 1)
        self._until_job(scene, JobState.ENDING)
        return scene

    def decode_running(self) -> Scene:
        pair, router, network = self._pair()
        gate = Gate(pair.models[1])
        name = self._ask(router)
        assert gate.reached.wait(60)
        return Scene(pair, router, network, name, gate.opened.set)

    def decode_preempted(self) -> Scene:
        pair, router, network = self._pair(full_pages=14, prefix_cache=False)
        router.hold_prefill = True
        other = router.generate(router.random_prompt(60), max_tokens=90)
        prompt = router.random_prompt(PROMPT_TOKENS)
        name = router.generate(prompt, max_tokens=60, deadline_s=self._deadline_s)
        until(lambda: {other, name} <= router.tickets.keys(), "both reservations")
        gate = Gate(pair.models[1])  # neither goes on before both are there: they run out of pages together
        router.begin_prefill()
        until(lambda: pair.decode.status().counters.get("receives_complete") == 2, "the KV of both")
        router.wait_prefilled(other, name)
        router.hold_prefill = True
        gate.opened.set()
        until(lambda: len(router.requests[name].attempts) > 1, "the preemption")
        return Scene(pair, router, network, name, lambda: None)

    def _until_job(self, scene: Scene, state: JobState) -> None:
        jobs = scene.pair.prefill._dispatch._jobs

        def there() -> bool:
            job = jobs.get((scene.name, 1))
            return job is not None and job.state is state

        until(there, f"job {state}")

    def _until_receive(self, scene: Scene, state: ReceiveState) -> None:
        receiver = scene.pair.decode._dispatch.receiver
        until(lambda: receiver.state((scene.name, 1)) is state, f"receive {state}")
