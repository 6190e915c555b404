"""Random schedules: whatever is submitted, aborted, lost, delayed or overdue, the text is right and no page
stays.

A prefill engine and a decode engine with tiny caches, so that preemption is common. A late writer scribbles
over every page that it might still write: reservations that are not complete, and quarantined pages.

Every way to run an engine is held to the same definition, so all of them say the same. The late ones begin a
step only when it is waited for, when the next one has long been planned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine import device_choice
from antiphon.engine.events import (
    KvWritten,
    PagesReserved,
    PrefillComputed,
    PrefillStarted,
    SequenceFinished,
)
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.protocol.messages import FinishReason


class Schedule:
    """Two engines, their owners and a transport that is late."""

    def __init__(self, kit: Any, mode: str) -> None:
        self.kit = kit
        self.now = 0.0
        tiny: dict[str, int] = {"sliding_pages": 10, "max_batch_size": 4, "max_reservations_waiting": 2}
        self.prefill_model, self.decode_model = self.kit.FakeModel(), self.kit.FakeModel()
        self.prefill: EngineLoop = self.kit.engine(
            mode,
            self.prefill_model,
            self.kit.settings(full_pages=9, **tiny),
            on_kv_written=self.ship,
            clock=lambda: self.now,
        )
        self.decode: EngineLoop = self.kit.engine(
            mode,
            self.decode_model,
            self.kit.settings(full_pages=8, **tiny),
            on_scheduled=self.reserved,
            clock=lambda: self.now,
        )
        self.said = self.kit.Transcript()
        self.requests: dict[str, EngineRequest] = {}
        self.writers: dict[str, PagesReserved] = {}
        self.to_scribble: dict[tuple[str, int], PagesReserved] = {}
        self.mail: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------- what happens

    def submit(
        self,
        kind: RequestKind,
        length: int,
        salt: int,
        stop: tuple[int, ...],
        style: dict[str, Any],
        **more: Any,
    ) -> None:
        request = self.kit.request(
            f"r{len(self.requests)}",
            self.kit.prompt_of(length, salt),
            kind=kind,
            stop_token_ids=stop,
            seed=length,
            **style,
            **more,
        )
        self.requests[request.request_id] = request
        self.decode.submit(request)

    def both_step(self, times: int) -> None:
        for _ in range(times):
            self.step_decode()
            self.step_prefill()

    def step_decode(self) -> None:
        before = len(self.said.events)
        self.said.take(self.decode.step())
        for event in self.said.events[before:]:
            self.hear(event)

    def step_prefill(self) -> None:
        for event in self.prefill.step():
            if isinstance(event, PrefillComputed):
                self.mail.append(lambda e=event: self.arrived(e))
            elif isinstance(event, SequenceFinished) and event.quarantined:
                self.mail.append(lambda e=event: self.prefill.release_quarantined(e.request_id, e.attempt))

    def deliver(self, which: int, count: int = 1) -> None:
        for _ in range(min(count, len(self.mail))):
            self.mail.pop(which % len(self.mail))()

    def abort(self, which: int, during_step: bool) -> None:
        live = [request_id for request_id in self.requests if request_id not in self.said.finished]
        if not live:
            return
        request_id = live[which % len(live)]
        if during_step:
            self.decode_model.interrupt = lambda: self.end(request_id)
        else:
            self.end(request_id)

    def lose(self, which: int) -> None:
        if not self.writers:
            return
        request_id = sorted(self.writers)[which % len(self.writers)]
        reserved = self.writers.pop(request_id)
        self.scribble(reserved)
        self.prefill.abort(request_id, reserved.attempt, writer_granted=bool(which % 2))
        self.decode.kv_lost(request_id, reserved.attempt)

    def time_passes(self) -> None:
        self.now += 2.0

    def late_writers(self) -> None:
        for reserved in self.to_scribble.values():
            self.scribble(reserved)

    def accounts_balance(self) -> None:
        self.prefill.check_pages()
        self.decode.check_pages()

    # -------------------------------------------------------------------------------------- the owners

    def reserved(self, event: PagesReserved | PrefillStarted) -> None:
        """Before the step is launched: a peer may write from here on, and every other one does at once."""
        if not isinstance(event, PagesReserved) or event.kv_tokens == event.cached_tokens:
            return
        request = self.requests[event.request_id]
        tokens = (*request.prompt_token_ids, *self.said.tokens.get(event.request_id, ()))
        assert event.kv_tokens == len(tokens) - 1
        self.writers[event.request_id] = event
        self.scribble(event)
        self.prefill.submit(
            self.kit.request(event.request_id, tokens, kind=RequestKind.PREFILL_ONLY, attempt=event.attempt)
        )
        if event.kv_tokens % 2:
            for _ in range(5):
                self.step_prefill()

    def hear(self, event: object) -> None:
        if isinstance(event, PrefillComputed):
            self.mail.append(lambda: self.decode.release(event.request_id, event.attempt))
        elif isinstance(event, SequenceFinished):
            self.finished(event)

    def finished(self, event: SequenceFinished) -> None:
        reserved = self.writers.pop(event.request_id, None)
        if reserved is not None:
            self.prefill.abort(event.request_id, reserved.attempt, writer_granted=True)
        if event.quarantined:
            name = event.request_id, event.attempt
            if reserved is not None:
                self.to_scribble[name] = reserved

            def drained() -> None:
                self.to_scribble.pop(name, None)
                self.decode.release_quarantined(*name)

            self.mail.append(drained)

    def end(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request_id not in self.said.finished:
            exposed = request_id in self.writers or request.kind is RequestKind.PREFILL_ONLY
            self.decode.abort(request_id, request.attempt, writer_granted=exposed)

    def ship(self, event: KvWritten) -> None:
        reserved = self.writers.get(event.request_id)
        if reserved is None or reserved.attempt != event.attempt:
            return
        for group, pairs, first, pages in (
            ("full", event.full_pages, reserved.cached_tokens // self.kit.PAGE, reserved.full_pages),
            ("sliding", event.sliding_pages, reserved.sliding_first_page, reserved.sliding_pages),
        ):
            source, target = self.prefill.kv_cache.memory(group), self.decode.kv_cache.memory(group)
            half = slice(event.layer_group, event.layer_group + 1)  # 2 layers and 2 layer groups
            for logical, physical in pairs:
                if logical >= first:
                    target[pages[logical - first], half] = source[physical, half]

    def arrived(self, event: PrefillComputed) -> None:
        reserved = self.writers.get(event.request_id)
        if reserved is not None and reserved.attempt == event.attempt:
            del self.writers[event.request_id]
            self.decode.kv_ready(event.request_id, event.attempt)
            self.prefill.release(event.request_id, event.attempt)

    def scribble(self, reserved: PagesReserved) -> None:
        for group, pages in (("full", reserved.full_pages), ("sliding", reserved.sliding_pages)):
            self.decode.kv_cache.memory(group)[list(pages)] = -1.0

    # ------------------------------------------------------------------------------------------ the end

    def finish(self) -> None:
        self.now += 0.0
        for _ in range(3000):
            if not (self.mail or self.decode.has_work() or self.prefill.has_work()):
                break
            self.late_writers()
            while self.mail:
                self.deliver(0)
            self.step_decode()
            self.step_prefill()
        else:
            raise AssertionError(f"no rest: {self.decode.snapshot()} {self.prefill.snapshot()}")
        assert not self.kit.held_pages(self.decode)
        assert not self.kit.held_pages(self.prefill)
        assert set(self.said.finished) == set(self.requests)
        for request_id, request in self.requests.items():
            self.compare(request, self.said.finished[request_id])

    def compare(self, request: EngineRequest, end: SequenceFinished) -> None:
        spoken = self.said.tokens.get(request.request_id, [])
        if request.kind is RequestKind.PREFILL_ONLY:
            assert spoken == []
            assert end.reason in (FinishReason.STOP, FinishReason.ABORT, FinishReason.DEADLINE)
            return
        expected = self.expected(request)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert spoken == expected
        else:
            assert end.reason in (FinishReason.ABORT, FinishReason.DEADLINE)
            assert spoken == expected[: len(spoken)]

    def expected(self, request: EngineRequest) -> list[int]:
        """What it must say in whatever way it is run, so that it is worked out once for all of them."""
        limit = self.decode.settings.max_sequence_tokens
        if (request, limit) not in EXPECTED:
            EXPECTED[request, limit] = self.decode_model.expected(request, limit)
        return EXPECTED[request, limit]


EXPECTED: dict[tuple[EngineRequest, int], list[int]] = {}
"""Request and the longest sequence -> its tokens."""


STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.7, "top_logprobs": 2},
    {"temperature": 1.5, "top_k": 2, "min_p": 0.01},
    {"temperature": 0.8, "frequency_penalty": 0.7},
    {"presence_penalty": 0.5, "top_logprobs": 0},
    {"temperature": 0.8, "min_tokens": 9, "logit_bias": ((3, 2.0), (5, -9.0))},
)
"""Greedy, drawn, cut; and those that must know every token before the next one is sampled."""


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that a cut often lies beyond them, and a position has to be computed again."""
    monkeypatch.setattr(device_choice, "CANDIDATES", 4)


SUBMIT = st.tuples(
    st.just("submit"),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(RequestKind),
            "length": st.integers(1, 110),
            "salt": st.integers(0, 1),
            "max_tokens": st.integers(1, 40),
            "priority": st.integers(0, 1),
            "style": st.sampled_from(STYLES),
            "deadline_s": st.sampled_from((None, None, None, 5.0)),
            "stop": st.sampled_from(((), (3, 17, 44))),
        }
    ),
)


def _rule(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


OPERATIONS = st.one_of(
    SUBMIT,
    SUBMIT,
    _rule("both_step", times=st.integers(1, 6)),
    _rule("both_step", times=st.integers(1, 6)),
    _rule("step_decode"),
    _rule("step_prefill"),
    _rule("deliver", which=st.integers(0, 5), count=st.integers(1, 4)),
    _rule("abort", which=st.integers(0, 50), during_step=st.booleans()),
    _rule("lose", which=st.integers(0, 5)),
    _rule("time_passes"),
    _rule("late_writers"),
)


@pytest.mark.parametrize("mode", ["plain", "overlapped late", "graphs late"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=st.lists(OPERATIONS, min_size=40, max_size=120))
def test_random_schedules(kit: Any, mode: str, operations: list[tuple[str, dict[str, Any]]]) -> None:
    schedule = Schedule(kit, mode)
    for name, arguments in operations:
        getattr(schedule, name)(**arguments)
        schedule.accounts_balance()
    schedule.finish()


def _dense(rng: random.Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schedule that keeps both engines loaded; less can be shrunk, more can go wrong."""
    names = ("submit", "both_step", "step_decode", "deliver", "abort", "lose", "time_passes", "late_writers")
    for name in rng.choices(names, weights=(10, 20, 8, 15, 4, 3, 1, 3), k=count):
        yield (
            name,
            {
                "submit": lambda: {
                    "kind": rng.choice((*RequestKind, RequestKind.REMOTE_KV)),
                    "length": rng.randint(1, 80),
                    "salt": rng.randint(0, 1),
                    "max_tokens": rng.randint(1, 70),
                    "priority": rng.randint(0, 1),
                    "style": rng.choice(STYLES),
                    "deadline_s": rng.choice((None, None, None, None, 5.0)),
                    "stop": rng.choice(((), (), (3, 17))),
                },
                "both_step": lambda: {"times": rng.randint(1, 8)},
                "deliver": lambda: {"which": rng.randint(0, 5), "count": rng.randint(1, 4)},
                "abort": lambda: {"which": rng.randint(0, 500), "during_step": rng.random() < 0.5},
                "lose": lambda: {"which": rng.randint(0, 5)},
            }.get(name, dict)(),
        )


@pytest.mark.parametrize("mode", ["plain", "overlapped", "overlapped late", "graphs late"])
def test_dense_schedules(kit: Any, mode: str) -> None:
    preemptions = hits = received = 0
    for seed in range(5):
        schedule = Schedule(kit, mode)
        for name, arguments in _dense(random.Random(seed), 300):
            getattr(schedule, name)(**arguments)
            schedule.accounts_balance()
        schedule.finish()
        seen = schedule.decode.snapshot()
        preemptions += seen.preemptions
        hits += seen.prefix_hit_tokens
        received += seen.received_prompt_tokens
    assert min(preemptions, hits, received) > 0
