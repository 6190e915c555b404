"""Runs a workload against a target, on schedule.

Open loop: every first turn is sent at its intended time, whatever came of the others. When ``max_in_flight``
is reached a request waits, and that wait is part of its latency (no coordinated omission). Closed loop: a
number of users each send their next session when the last has been answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.benchmarks.serve.client import Client, Conversation, Target
from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.workload import Session

LAG_PROBE_S = 0.01
START_DELAY_S = 0.1
"""Between making the tasks and second 0, so that making them delays no request."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run."""

    max_in_flight: int = 4096
    warmup_s: float = 0.0
    """Requests intended before this second are sent and left out of the figures."""
    drain_s: float = 120.0
    """After the last intended time, how long answers may still take; what is open then is an error."""
    duration_s: float = 0.0
    """Of an open loop that its duration ends. Rates are of all of it: the last arrival lies before its end by
    chance, by a fifth of it on average where there are four."""


@dataclass(slots=True)
class Run:
    """Everything that was observed."""

    observations: list[Observation] = field(default_factory=list)
    began_s: float = 0.0
    """Second 0 of the schedule, on the monotonic clock."""
    measured_from_s: float = 0.0
    measured_to_s: float = 0.0
    """Window of the rates: end of the warm-up to the end of the duration, or to the last intended time where
    that is later or there is no duration (closed loop: to the last answer)."""
    loop_lag_s: list[float] = field(default_factory=list)
    """How late the generator's own timer fired, sampled through the run."""
    peak_in_flight: int = 0
    cpu_share: float = 0.0
    """CPU seconds of the generator over wall seconds; near 1 the generator is the limit."""

    def measured(self) -> list[Observation]:
        """Without the warm-up."""
        return [each for each in self.observations if each.intended_s >= self.measured_from_s]


OnDone = Callable[[Observation], None]


class _Runner:
    def __init__(self, target: Target, limits: Limits, on_done: OnDone | None) -> None:
        self.client = Client(target)
        self._target = target
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        self._in_flight = 0
        self._on_done = on_done
        self.run = Run()

    async def session(self, index: int, session: Session, intended_s: float) -> None:
        """All turns of a session; a failed turn ends it."""
        conversation = Conversation(self._target)
        for number, turn in enumerate(session.turns):
            prompt, tokens = conversation.prompt(turn)
            body = self.client.body(prompt, turn.output_tokens)
            await _sleep_until(intended_s)
            seen = Observation(index, number, intended_s, input_asked=tokens, output_asked=turn.output_tokens)
            self.run.observations.append(seen)
            try:
                text = await self._send(seen, body)
            except asyncio.CancelledError:
                seen.error, seen.ended_s = "still open when the run ended", time.monotonic()
                raise
            if not seen.ok:
                return
            conversation.answered(text, seen.output_tokens, -1 - (index << 16) - number)
            intended_s = seen.ended_s + session.think_s

    async def _send(self, seen: Observation, body: bytes) -> str:
        async with self._slots:
            self._in_flight += 1
            self.run.peak_in_flight = max(self.run.peak_in_flight, self._in_flight)
            try:
                return await self.client.send(seen, body)
            finally:
                self._in_flight -= 1
                if self._on_done is not None:
                    self._on_done(seen)


async def run_open_loop(
    target: Target, sessions: Sequence[Session], limits: Limits, on_done: OnDone | None = None
) -> Run:
    """Send every session at its time; wait for answers at most ``limits.drain_s`` after the last."""
    runner = _Runner(target, limits, on_done)
    run = runner.run
    await runner.client.resolve()
    async with _Watched(run):
        run.began_s = time.monotonic() + START_DELAY_S
        last_s = run.began_s + max(session.arrives_s for session in sessions)
        tasks = await _launch(runner, sessions, run.began_s)
        try:
            await asyncio.wait(tasks, timeout=max(0.0, last_s + limits.drain_s - time.monotonic()))
        finally:
            await _stop({task for task in tasks if not task.done()})
        _raise_first(tasks)
    run.measured_from_s = run.began_s + limits.warmup_s
    run.measured_to_s = max(
        last_s, run.began_s + limits.duration_s, *(seen.intended_s for seen in run.observations)
    )
    return run


async def run_closed_loop(
    target: Target, sessions: Sequence[Session], users: int, limits: Limits, on_done: OnDone | None = None
) -> Run:
    """``users`` take the sessions in turn, each its next one as soon as the last is answered."""
    runner = _Runner(target, limits, on_done)
    run = runner.run
    await runner.client.resolve()
    waiting = iter(enumerate(sessions))

    async def user() -> None:
        for index, session in waiting:
            await runner.session(index, session, time.monotonic())

    async with _Watched(run):
        run.began_s = time.monotonic()
        tasks = {asyncio.create_task(user()) for _ in range(min(users, len(sessions)))}
        try:
            await asyncio.gather(*tasks)
        finally:
            await _stop(tasks)
    run.measured_from_s = run.began_s + limits.warmup_s
    run.measured_to_s = max((o.ended_s for o in run.observations), default=run.began_s)
    return run


async def _launch(runner: _Runner, sessions: Sequence[Session], began_s: float) -> set[asyncio.Task[None]]:
    """A task per session, made shortly before its time so that a long trace needs little memory."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        for index, session in enumerate(sessions):
            intended_s = began_s + session.arrives_s
            await _sleep_until(intended_s - START_DELAY_S)
            tasks.add(asyncio.create_task(runner.session(index, session, intended_s)))
    except asyncio.CancelledError:
        await _stop(tasks)
        raise
    return tasks


class _Watched:
    """Samples the event loop's lag and the process's CPU while a run goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __aenter__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._probe())

    async def __aexit__(self, *_: object) -> None:
        await _stop({self._task})
        wall_s = time.monotonic() - self._wall_s
        self._run.cpu_share = (time.process_time() - self._cpu_s) / wall_s if wall_s else 0.0

    async def _probe(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._run.loop_lag_s.append(max(0.0, time.monotonic() - due_s))


async def _sleep_until(when_s: float) -> None:
    delay_s = when_s - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _stop(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_first(tasks: set[asyncio.Task[None]]) -> None:
    """A failed request is an observation; an exception of a task is a fault of this program."""
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
