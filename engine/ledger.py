"""The live sequences of an engine and every change of their state outside of planning.

Owned by the engine thread. Commands and step results come in, events come out.
"""

from __future__ import annotations

from collections import Counter

from antiphon.engine import intake
from antiphon.engine.allocation import FULL, SLIDING, SequencePages
from antiphon.engine.batch import Work
from antiphon.engine.deadlines import Deadlines
from antiphon.engine.events import (
    EngineEvent,
    KvWritten,
    PagesReserved,
    PrefillComputed,
    PrefillStarted,
    SequenceFinished,
    TokensSampled,
)
from antiphon.engine.grammar_compiler import GrammarError
from antiphon.engine.requests import RequestKind
from antiphon.engine.sampler import Choice
from antiphon.engine.scheduler import Scheduler
from antiphon.engine.sequence import Sequence, SequenceStatus
from antiphon.engine.settings import EngineSettings
from antiphon.engine.snapshot import EngineSnapshot
from antiphon.protocol.errors import IllegalTransition
from antiphon.protocol.messages import FinishReason


class Ledger:
    """Owns the sequences, their pages and the engine's counters."""

    def __init__(self, settings: EngineSettings, inbox: intake.Inbox) -> None:
        self._settings = settings
        self._max_sequence_tokens = settings.max_sequence_tokens
        self._inbox = inbox
        self.pages = SequencePages(settings)
        self.scheduler = Scheduler(settings, self.pages)
        self._sequences: dict[str, Sequence] = {}
        self.steps = 0
        self.generated_tokens = 0
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._finished_seen: dict[str, int] = {}
        self._deadlines = Deadlines()
        self.next_deadline_s: float | None = None
        """The earliest deadline of a live sequence."""

    # ------------------------------------------------------------------------------------------- commands

    def apply(self, command: intake.Command, now: float) -> list[EngineEvent]:
        """Carry out one command. A command for an attempt that is no longer there is counted and ignored:
        both sides of a link may end the same request at the same time."""
        if isinstance(command, intake.Submit):
            return self._take(command, now)
        if isinstance(command, intake.ReleaseQuarantined):
            found = self.pages.release_quarantined(command.request_id, command.attempt)
            self._counters["stale"] += not found
            self._inbox.unfence(command.request_id, command.attempt)
            return []
        if isinstance(command, intake.GrammarCompiled):
            return []  # it only wakes an engine that rests
        sequence = self._sequences.get(command.request_id)
        if isinstance(command, intake.Abort):
            if sequence is None or sequence.request.attempt > command.attempt_limit:
                self._counters["stale"] += 1
                return []
            return [self._finish(sequence, FinishReason.ABORT, now, quarantine=command.writer_granted)]
        if sequence is None or sequence.attempt != command.attempt:
            self._counters["stale"] += 1
            return []
        if isinstance(command, intake.Release):
            if sequence.status is not SequenceStatus.PINNED:
                raise IllegalTransition(
                    f"request {command.request_id} attempt {command.attempt} was released while "
                    f"{sequence.status}"
                )
            return [self._finish(sequence, FinishReason.STOP, now)]
        if sequence.status is not SequenceStatus.RESERVED:
            self._counters["stale"] += 1  # a repeated notification
        elif isinstance(command, intake.KvReady):
            self._counters["received"] += sequence.kv_target - sequence.cached_tokens
            self.scheduler.receive(sequence)
            self._runnable(sequence, now)
        else:
            self.scheduler.preempt(sequence)
            sequence.queued_s = now
        return []

    def _take(self, command: intake.Submit, now: float) -> list[EngineEvent]:
        request = command.request
        sequence = Sequence(request, command.arrival, command.submitted_s, command.grammar, command.token_ids)
        self._sequences[request.request_id] = sequence
        self.scheduler.enqueue(sequence)
        if sequence.deadline_s is not None:
            self._deadlines.add(sequence.deadline_s, sequence.arrival, request.request_id)
        if self._inbox.is_fenced(request.request_id, request.attempt):
            error = f"attempt {request.attempt} is not newer than a quarantined one"
            return [self._finish(sequence, FinishReason.ERROR, now, error=error)]
        return []

    def expire(self, now: float) -> list[EngineEvent]:
        """End every sequence whose deadline has passed.

        The engine does not know whether a transport was let at the pages, so it assumes so wherever that is
        possible, and the owner releases the quarantine when it was not.
        """
        events: list[EngineEvent] = []
        self.next_deadline_s = None
        while (first := self._deadlines.first()) is not None:
            deadline_s, arrival, request_id = first
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                if deadline_s > now:
                    self.next_deadline_s = deadline_s
                    break
                exposed = sequence.status is SequenceStatus.RESERVED
                exposed |= sequence.kind is RequestKind.PREFILL_ONLY
                events.append(self._finish(sequence, FinishReason.DEADLINE, now, quarantine=exposed))
            self._deadlines.pop()
        return events

    # -------------------------------------------------------------------------------------------- planning

    def preempted(self, sequence: Sequence, now: float) -> None:
        """The scheduler took a sequence's pages back."""
        sequence.preemptions += 1
        sequence.queued_s = now
        self._counters["preemptions"] += 1

    def admitted(self, sequence: Sequence, now: float) -> PagesReserved | PrefillStarted:
        """The scheduler gave a sequence its pages; what its owner must know about that."""
        waited = now - sequence.queued_s
        sequence.started_s = now
        if sequence.status is not SequenceStatus.RESERVED:
            self._runnable(sequence, now)
        if sequence.kind is RequestKind.REMOTE_KV:
            return self._reserved(sequence, waited)
        return PrefillStarted(
            sequence.request.request_id,
            sequence.attempt,
            sequence.cached_tokens,
            self.scheduler.chunks(sequence),
            waited,
        )

    @staticmethod
    def _runnable(sequence: Sequence, now: float) -> None:
        if sequence.first_token_s is None:
            sequence.runnable_s = now

    def _reserved(self, sequence: Sequence, waited: float) -> PagesReserved:
        missing = self.pages.missing(sequence)
        return PagesReserved(
            request_id=sequence.request.request_id,
            attempt=sequence.attempt,
            kv_tokens=sequence.kv_target,
            cached_tokens=sequence.cached_tokens,
            full_pages=tuple(missing[FULL]),
            sliding_pages=tuple(missing[SLIDING]),
            sliding_first_page=self.pages.first_missing_sliding(sequence),
            reserve_s=waited,
        )

    # ------------------------------------------------------------------------------------------- computing

    def kv_written(self, work: Work, layer_groups: int) -> list[KvWritten]:
        """What each layer group of one chunk will have completed."""
        sequence, table, size = work.sequence, work.sequence.pages, self._settings.page_size_tokens
        first = 0 if work.chunk == 0 else work.start // size
        end = -(-work.end // size)
        sliding: tuple[tuple[int, int], ...] = ()
        if work.last_chunk:
            begin = self.pages.window_first(work.end)
            held = table.sliding[begin - table.sliding_first : end - table.sliding_first]
            sliding = tuple(zip(range(begin, end), held, strict=True))
        full = tuple(zip(range(first, end), table.full[first:end], strict=True))
        request_id, chunk = sequence.request.request_id, work.chunk or 0
        return [
            KvWritten(request_id, sequence.attempt, chunk, group, work.last_chunk, full, sliding)
            for group in range(layer_groups)
        ]

    def commit(self, work: Work, choice: Choice | None, step: int, now: float) -> list[EngineEvent]:
        """One item of a step was computed and perhaps sampled."""
        sequence = work.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return []  # aborted while the step computed, or ended by the step before it
        if sequence.void_step == step:
            return []
        if sequence.status is SequenceStatus.PREFILLING:
            self._counters["computed"] += work.count
        self.scheduler.complete(work)
        if sequence.status is SequenceStatus.PINNED:
            started = now if sequence.started_s is None else sequence.started_s
            return [PrefillComputed(sequence.request.request_id, sequence.attempt, now - started)]
        if choice is None:
            return []
        if choice.error is not None:
            return [self._finish(sequence, FinishReason.GRAMMAR, now, error=choice.error)]
        if choice.undecided:
            sequence.sorts_whole_row = True
            self.scheduler.void(sequence, step)
            return []
        if choice.token_id is None:
            self.pages.distrust(sequence)
            error = f"the logits of output position {sequence.output_tokens} are not finite"
            return [self._finish(sequence, FinishReason.ERROR, now, error=error)]
        return self._emit(sequence, choice.token_id, choice, now)

    def _emit(self, sequence: Sequence, token: int, choice: Choice, now: float) -> list[EngineEvent]:
        position = sequence.output_tokens
        sequence.token_ids.append(token)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        self.generated_tokens += 1
        logprobs = None if choice.logprobs is None else (choice.logprobs,)
        request_id = sequence.request.request_id
        events: list[EngineEvent] = [
            TokensSampled(request_id, sequence.attempt, position, (token,), logprobs)
        ]
        if sequence.grammar is not None:
            try:
                sequence.grammar.state.advance(token)
            except GrammarError as error:
                return [*events, self._finish(sequence, FinishReason.GRAMMAR, now, error=str(error))]
        reason = self._stop_reason(sequence, token)
        if reason is not None:
            stop = token if reason is FinishReason.STOP else None
            events.append(self._finish(sequence, reason, now, stop_token_id=stop))
        return events

    def _stop_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.sampling
        if params is None:
            return None
        # Before min_tokens the sampler has banned the stop ids, so none can arrive here too early.
        if token in params.stop_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        tokens = len(sequence.token_ids)
        if tokens >= sequence.length_limit or tokens >= self._max_sequence_tokens:
            return FinishReason.LENGTH
        return None

    # ------------------------------------------------------------------------------------------------ ends

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        quarantine: bool = False,
    ) -> SequenceFinished:
        request_id = sequence.request.request_id
        quarantined = False
        if quarantine:
            quarantined = self.pages.quarantine(sequence)
        else:
            self.pages.release(sequence)
        if quarantined:
            self._inbox.fence(request_id, sequence.attempt)
        self.scheduler.finish(sequence)
        del self._sequences[request_id]
        self._inbox.ended(request_id, sequence.request.attempt)
        self._finished[reason.value] += 1
        self._finished_seen = dict(self._finished)
        first, runnable = sequence.first_token_s, sequence.runnable_s
        return SequenceFinished(
            request_id=request_id,
            attempt=sequence.attempt,
            reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            first_step_s=0.0 if first is None or runnable is None else max(0.0, first - runnable),
            decode_s=0.0 if first is None else now - first,
            preemptions=sequence.preemptions,
            quarantined=quarantined,
        )

    # --------------------------------------------------------------------------------------------- account

    def check(self) -> None:
        """Balance the pages against the sequences.

        Raises:
            AccountingError: they differ.
        """
        self.pages.check(self._sequences.values())

    def snapshot(self) -> EngineSnapshot:
        """Counts as of now."""
        scheduler = self.scheduler
        return EngineSnapshot(
            running=scheduler.count(SequenceStatus.RUNNING, SequenceStatus.PREFILLING),
            waiting=scheduler.waiting_count,
            awaiting_kv=scheduler.count(SequenceStatus.RESERVED),
            pinned=scheduler.count(SequenceStatus.PINNED),
            quarantined=self.pages.quarantined_count,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            pages={group: self.pages.pool(group).counts() for group in (FULL, SLIDING)},
            max_sequence_tokens=self._settings.max_sequence_tokens,
            steps=self.steps,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            computed_prompt_tokens=self._counters["computed"],
            received_prompt_tokens=self._counters["received"],
            generated_tokens=self.generated_tokens,
            preemptions=self._counters["preemptions"],
            stale_commands=self._counters["stale"],
            finished=self._finished_seen,
        )
