"""The engine's heartbeat: intake, schedule, launch, wait, commit; plainly, and with two steps overlapping."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from antiphon.engine import intake
from antiphon.engine.events import EngineEvent, KvWritten, PagesReserved, PrefillStarted, SequencePreempted
from antiphon.engine.executor import Executor, LaunchedStep
from antiphon.engine.executors import make_executor
from antiphon.engine.grammar import OutputGrammar
from antiphon.engine.grammar_compiler import GrammarCompiler
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.ledger import Ledger
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import EngineRequest
from antiphon.engine.sampler import Choice
from antiphon.engine.scheduler import StepPlan
from antiphon.engine.settings import EngineSettings
from antiphon.engine.snapshot import EngineSnapshot
from antiphon.model.forward import LanguageModel


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step that computes, or has computed, and is not committed."""

    plan: StepPlan
    launched: LaunchedStep


class EngineLoop:
    """One engine: token ids in, token ids out.

    One thread, the engine thread, calls ``step``; every other method may be called from any thread. Commands
    are taken in the order in which they were given, at the start of a step and again before its outputs are
    committed, so an abort that arrives while a step computes wins over what that step produced.

    With ``settings.overlap`` a step is planned and launched before the one in flight is committed, so that
    the device never waits for the host. The tokens are the same. A sequence that turns out to have ended has
    its part of the younger step thrown away, and keeps its pages until that step is over.

    Every submitted request ends with exactly one ``SequenceFinished``.

    Args:
        model: writes KV into the pages that this engine plans; a prefill worker's has no output projection.
        settings: sizes and bounds.
        device, kv_dtype: where the pages live and what they hold.
        kv_heads: kv heads of this rank; all of the model's when absent.
        full_fp8: pages of full layers hold FP8 instead.
        on_scheduled: called on the engine thread with each PagesReserved and PrefillStarted of a step after
            it is planned. A PrefillStarted waits until the device has work where it computes while the host
            goes on: whom the callback wakes would take the interpreter's lock from the launch. It comes
            before every KvWritten of its request all the same. ``step`` returns the same events later.
        on_kv_written: called on the engine thread while the step computes, right after the last layer of a
            layer group was issued. On a CUDA device the reader must order itself after the current stream.
            ``step`` returns the same events later.
        clock: monotonic seconds.
        grammars: compiles the grammars of requests; absent, a request with one is refused.
        executor: computes steps; absent, the one that the settings ask for. ``executor.road`` says which.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: EngineSettings,
        *,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype = torch.float32,
        kv_heads: int | None = None,
        full_fp8: bool = False,
        on_scheduled: Callable[[PagesReserved | PrefillStarted], None] | None = None,
        on_kv_written: Callable[[KvWritten], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
        executor: Callable[[LanguageModel, PagedKvCache, EngineSettings], Executor] = make_executor,
    ) -> None:
        self.settings = settings
        self._grammars = grammars
        self.kv_cache = PagedKvCache(
            model.config,
            full_pages=settings.full_pages,
            sliding_pages=settings.sliding_pages,
            page_size=settings.page_size_tokens,
            dtype=kv_dtype,
            device=device,
            kv_heads=kv_heads,
            full_fp8=full_fp8,
        )
        self.executor = executor(model, self.kv_cache, settings)
        self._in_flight: InFlight | None = None
        self._inbox = intake.Inbox(settings.max_queued_requests)
        self._ledger = Ledger(settings, self._inbox)
        self._on_scheduled = on_scheduled
        self._on_kv_written = on_kv_written
        self._clock = clock
        self._events: list[EngineEvent] = []
        self._unsaid: list[PrefillStarted] = []
        """What ``on_scheduled`` is called with once the device has work."""
        self._changed = False
        self._stalled = True
        """The last step found nothing to do: only a command or a deadline can change that."""
        self._snapshot = self._ledger.snapshot()

    # ------------------------------------------------------------------------------------ the engine thread

    def step(self) -> list[EngineEvent]:
        """Run one step; returns its events in order. Does nothing, at once, when there is no work.

        Raises:
            AccountingError: the engine came to rest and its pages do not balance.
        """
        return self._overlapped_step() if self.settings.overlap else self._plain_step()

    def _plain_step(self) -> list[EngineEvent]:
        self._intake()
        current = self._launch(self._schedule())
        _go_on(current)
        choices = self._wait(current)
        self._intake()
        self._commit(current, choices)
        return self._settle(at_rest=current is None)

    def _overlapped_step(self) -> list[EngineEvent]:
        """As the plain one, but what is waited for and committed is the step launched the time before."""
        self._intake()
        current, self._in_flight = self._in_flight, self._launch(self._schedule())
        choices = self._wait(current)
        self._intake()
        self._commit(current, choices)
        _go_on(self._in_flight)
        return self._settle(at_rest=current is None and self._in_flight is None)

    def _intake(self) -> None:
        """Take commands and end what is overdue; pages in use by a step in flight change hands after it."""
        now = self._clock()
        for command in self._inbox.take():
            self._events += self._ledger.apply(command, now)
            self._changed = True
        self._events += self._ledger.expire(now)

    def _schedule(self) -> StepPlan:
        plan = self._ledger.scheduler.schedule()
        now = self._clock()
        self._changed |= bool(plan.preempted or plan.admitted)
        for sequence, attempt in plan.preempted:
            self._ledger.preempted(sequence, now)
            self._events.append(SequencePreempted(sequence.request.request_id, attempt))
        for sequence in plan.admitted:
            event = self._ledger.admitted(sequence, now)
            self._events.append(event)
            if self._on_scheduled is None:
                continue
            if isinstance(event, PrefillStarted) and self.settings.overlap:
                self._unsaid.append(event)
            else:
                self._on_scheduled(event)
        return plan

    def _say_started(self) -> None:
        if self._on_scheduled is not None:
            for event in self._unsaid:
                self._on_scheduled(event)
        self._unsaid.clear()

    def _launch(self, plan: StepPlan) -> InFlight | None:
        """Hand the plan to the device; None when there is nothing to compute or to commit."""
        launched = self._issue(plan) if plan.work else None
        self._say_started()
        self._changed |= self._ledger.pages.name_pages()
        return launched

    def _issue(self, plan: StepPlan) -> InFlight:
        computed = [work for work in plan.work if work.count]
        if len(computed) < len(plan.work):
            self._announce_cached(plan)
        if not any(work.chunk is not None for work in computed):
            return InFlight(plan, self.executor.launch(computed))
        prefills = [work for work in computed if work.chunk is not None]
        # Made now: by the time of a group's last layer the sequence may have ended and lost its pages.
        written = [self._ledger.kv_written(work, self.settings.layer_groups) for work in prefills]

        def on_layer_group(group: int) -> None:
            for events in written:
                self._announce(events[group])

        return InFlight(plan, self.executor.launch(computed, on_layer_group))

    def _announce_cached(self, plan: StepPlan) -> None:
        groups = self.settings.layer_groups
        cached = [self._ledger.kv_written(work, groups) for work in plan.work if not work.count]
        for group in range(groups):
            for events in cached:
                self._announce(events[group])

    def _announce(self, event: KvWritten) -> None:
        self._say_started()
        self._events.append(event)
        if self._on_kv_written is not None:
            self._on_kv_written(event)

    def _wait(self, step: InFlight | None) -> list[Choice]:
        """What a step chose; its pages are free to change hands from now on."""
        if step is None:
            return []
        choices = step.launched.result()
        self._ledger.pages.retire(step.plan.step)
        return choices

    def _commit(self, step: InFlight | None, choices: list[Choice]) -> None:
        if step is None:
            return
        now, number = self._clock(), step.plan.step
        chosen = iter(choices)
        for work in step.plan.work:
            choice = next(chosen) if work.samples else None
            self._events += self._ledger.commit(work, choice, number, now)
        self._ledger.steps += any(work.count for work in step.plan.work)

    def _settle(self, *, at_rest: bool) -> list[EngineEvent]:
        """Publish the counts and hand over the events; when nothing moves any more, balance the pages."""
        at_rest = at_rest and not self._changed and not self._events
        if at_rest and not self._stalled:
            self._ledger.check()
        self._stalled, self._changed = at_rest, False
        self._inbox.set_waiting(self._ledger.scheduler.waiting_count)
        self._snapshot = self._ledger.snapshot()
        events, self._events = self._events, []
        return events

    def check_pages(self) -> None:
        """Balance the pages against the sequences, between two steps; ``step`` does so whenever it rests.

        Raises:
            AccountingError: they differ.
        """
        self._ledger.check()

    # ------------------------------------------------------------------------------------------- any thread

    def submit(self, request: EngineRequest) -> None:
        """Hand in a request.

        Raises:
            RequestRejected: it can never run here (too long, bad ids or parameters, its id is live), or not
                now (queue full and it is new: ``retryable``).
        """
        token_ids = intake.check_request(request, self.settings)
        if request.grammar is None:
            self._inbox.submit(request, token_ids, self._clock())
            return
        if self._grammars is None:
            reason = "this engine has no vocabulary to follow a grammar by"
            raise RequestRejected(request.request_id, reason)
        compiling = self._grammars.compile(request.grammar)
        grammar = OutputGrammar(compiling, request.output_token_ids)
        self._inbox.submit(request, token_ids, self._clock(), grammar)
        compiled = intake.GrammarCompiled(request.request_id)
        compiling.add_done_callback(lambda _: self._inbox.give(compiled))

    def abort(self, request_id: str, attempt_limit: int, *, writer_granted: bool = False) -> None:
        """End the request if it was submitted with an attempt up to ``attempt_limit``; else nothing happens.

        ``writer_granted`` says that a transport may still write (REMOTE_KV) or read (PREFILL_ONLY) pages of
        the current attempt: they go to quarantine until ``release_quarantined``.
        """
        self._inbox.give(intake.Abort(request_id, attempt_limit, writer_granted))

    def kv_ready(self, request_id: str, attempt: int) -> None:
        """Every wanted position of this reservation was written; the sequence becomes runnable."""
        self._inbox.give(intake.KvReady(request_id, attempt))

    def kv_lost(self, request_id: str, attempt: int) -> None:
        """The KV will not come and its writer certainly writes no more: reserve again with attempt + 1."""
        self._inbox.give(intake.KvLost(request_id, attempt))

    def release(self, request_id: str, attempt: int) -> None:
        """The pages of a computed PREFILL_ONLY request were shipped; ends it with reason STOP.

        To be called after its PrefillComputed; before it, ``step`` raises IllegalTransition.
        """
        self._inbox.give(intake.Release(request_id, attempt))

    def release_quarantined(self, request_id: str, attempt: int) -> None:
        """No transport touches the pages of this ended attempt any more; they return to the pool."""
        self._inbox.give(intake.ReleaseQuarantined(request_id, attempt))

    def has_work(self) -> bool:
        """Whether a step would do something now."""
        if self._inbox or not self._stalled:
            return True
        deadline = self._ledger.next_deadline_s
        return deadline is not None and deadline <= self._clock()

    def wait_for_work(self, timeout_s: float) -> bool:
        """Block until a step would do something, or the timeout; returns ``has_work()``."""
        if self.has_work():
            return True
        deadline = self._ledger.next_deadline_s
        if deadline is not None:
            timeout_s = max(0.0, min(timeout_s, deadline - self._clock()))
        self._inbox.wait(timeout_s)
        return self.has_work()

    def snapshot(self) -> EngineSnapshot:
        """Counts as of the end of the last step, with the requests waiting now."""
        return self._snapshot.with_waiting(self._inbox.queued)


def _go_on(step: InFlight | None) -> None:
    """The tokens before a launched step are known: it can be completed."""
    if step is not None:
        step.launched.go_on()
