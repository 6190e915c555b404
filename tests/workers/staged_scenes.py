"""Scenes that bring one request to a state, on either side, and keep it there until ``let_go``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from antiphon.decode_worker.receiver import ReceiveState
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.prefill_worker.jobs import JobState
from antiphon.protocol.messages import AbortRequest

Start = Callable[..., tuple[Any, Any]]

PROMPT_TOKENS, OUTPUT_TOKENS = 90, 12


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


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


class Gate:
    """Keeps a fake model in its next forward pass."""

    def __init__(self, model: Any) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        model.interrupt = self._wait

    def _wait(self) -> None:
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


class Staging:
    """Builds scenes; each method is a state and returns once the request is in it."""

    def __init__(self, start: Start, make_config: Any, deadline_s: float | None) -> None:
        self._start, self._make_config, self._deadline_s = start, make_config, deadline_s

    def _pair(self, **decode_settings: object) -> tuple[Any, Any, InProcessNetwork]:
        network = InProcessNetwork()
        pair, router = self._start(
            network.transport,
            deployment=self._make_config(completion_timeout_s=0.3),
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
        self._until_receive(scene, ReceiveState.STOPPING)
        return scene

    def decode_abandoned(self) -> Scene:
        scene = self.decode_receiving()
        scene.router.hold_prefill = True
        self._until_receive(scene, ReceiveState.ABANDONED)
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
        other = router.generate(router.random_prompt(60), max_tokens=90)
        router.wait_tokens(other)
        # It must not have ended by the time that the one which takes its pages is there.
        there: list[str] = []
        Slow(pair.models[1], lambda: bool(there) and router.requests[there[0]].prefilled > 0)
        prompt = router.random_prompt(PROMPT_TOKENS)
        name = router.generate(prompt, max_tokens=60, deadline_s=self._deadline_s)
        there.append(name)
        until(lambda: router.requests[name].prefilled == 1, "the first prefill")
        router.hold_prefill = True
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
