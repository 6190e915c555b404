"""Who computes what in the next step: pure policy on plain data, no tensors, no threads, no clock.

Sequences that hold pages are served in the order (priority, arrival). Each running one takes one token, each
prefilling one a chunk, as long as the step's ``chunk_tokens`` last. When pages run out, the last sequence in
that order gives its pages back, is one attempt older and goes to the head of the queue. What waits is
admitted in queue order, and nothing overtakes a head that does not fit.

A PREFILL_ONLY sequence is never preempted, because a peer already counts on its chunks, and takes its chunks
whole, because their number was announced. It cannot deadlock with another: its full pages are held from the
start, and a second one begins only in a step that completes the first.

A step may be planned while the one before it is in flight. A sequence of that step goes on from where it
will be then, unless it will certainly have ended, or needs to know its tokens first. Nobody is preempted
meanwhile: what looks like a lack of pages may be gone when the step in flight is committed, so the next plan
is left empty, and what follows is planned with nothing in flight.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.engine.allocation import SequencePages
from antiphon.engine.batch import Work
from antiphon.engine.prefix_cache import PrefixHit
from antiphon.engine.requests import RequestKind
from antiphon.engine.sequence import Sequence, SequenceStatus
from antiphon.engine.settings import EngineSettings

_COMPUTING = (SequenceStatus.RUNNING, SequenceStatus.PREFILLING)


@dataclass(slots=True)
class StepPlan:
    """What one step does. ``preempted`` pairs a sequence with the attempt that lost its pages."""

    work: list[Work] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[tuple[Sequence, int]] = field(default_factory=list)
    budget_tokens: int = 0
    """Prompt tokens that this step may still compute."""
    prefill_blocked: bool = False
    """A prefill under way could not go on, so no other may start."""
    step: int = 0
    """Counts the plans with work; 0 when there is none."""

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing changed."""
        return not (self.work or self.admitted or self.preempted)


class Scheduler:
    """Owns which sequences wait and which hold pages."""

    def __init__(self, settings: EngineSettings, pages: SequencePages) -> None:
        self._settings = settings
        self._page_size = settings.page_size_tokens
        self._pages = pages
        self._queue: list[Sequence] = []
        self._active: list[Sequence] = []
        self._counts = dict.fromkeys(SequenceStatus, 0)
        """How many active sequences have each status."""
        self._drain = False
        """Somebody lacked pages while a step was in flight: plan nothing before it is committed."""
        self._queued_prefill_tokens: int | None = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    # ------------------------------------------------------------------------------------------- queries

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without pages, head first."""
        return tuple(self._queue)

    @property
    def active(self) -> tuple[Sequence, ...]:
        """Sequences with pages, in serving order."""
        return tuple(self._active)

    def count(self, *statuses: SequenceStatus) -> int:
        """How many sequences with pages are in one of these states."""
        return sum(self._counts[status] for status in statuses)

    @property
    def waiting_count(self) -> int:
        """How many sequences wait without pages."""
        return len(self._queue)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens not yet computed, of all sequences that this engine prefills."""
        if self._queued_prefill_tokens is None:
            self._queued_prefill_tokens = sum(
                max(0, sequence.prefill_target - sequence.computed_tokens)
                for sequence in (*self._queue, *self._active)
                if sequence.kind is not RequestKind.REMOTE_KV
                and sequence.status not in (SequenceStatus.RUNNING, SequenceStatus.PINNED)
            )
        return self._queued_prefill_tokens

    # ------------------------------------------------------------------------------------------ commands

    def enqueue(self, sequence: Sequence) -> None:
        """Put a QUEUED or PREEMPTED sequence where it belongs in the queue."""
        insort(self._queue, sequence, key=lambda waiting: waiting.queue_order)
        self._queued_prefill_tokens = None

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and end it; its pages are the caller's business."""
        if sequence in self._active:
            self._counts[sequence.status] -= 1
            self._active.remove(sequence)
        else:
            self._queue.remove(sequence)
        if sequence.status is not SequenceStatus.RUNNING:
            self._queued_prefill_tokens = None
        sequence.move(SequenceStatus.FINISHED)

    def receive(self, sequence: Sequence) -> None:
        """A peer wrote all KV of a RESERVED sequence: it runs."""
        self._pages.receive(sequence)
        self._move(sequence, SequenceStatus.RUNNING)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages back and queue it again, one attempt later."""
        self._pages.release(sequence)
        self._counts[sequence.status] -= 1
        self._active.remove(sequence)
        sequence.move(SequenceStatus.PREEMPTED)
        sequence.attempt += 1
        self.enqueue(sequence)

    def schedule(self) -> StepPlan:
        """Plan one step: grow or preempt what runs, then admit."""
        plan = StepPlan(budget_tokens=self._settings.chunk_tokens)
        if self._drain and self._pages.step_in_flight:
            return plan
        self._drain = False
        for sequence in tuple(self._active):
            if sequence.status is SequenceStatus.RUNNING:
                self._plan_decode(plan, sequence)
            elif sequence.status is SequenceStatus.PREFILLING:
                self._plan_prefilling(plan, sequence)
            if self._drain:
                break
        if not plan.preempted and not self._drain:
            while self._queue and self._admit_head(plan):
                pass
        if plan.work:
            plan.work.sort(key=lambda work: work.count > 1)  # kernels of one query a sequence take the front
            self._number(plan)
        return plan

    def _number(self, plan: StepPlan) -> None:
        """Note what will be there when the plan has been carried out."""
        self._pages.planned_step = plan.step = self._pages.planned_step + 1
        for work in plan.work:
            sequence = work.sequence
            sequence.last_step = plan.step
            sequence.planned_tokens = work.end
            if work.samples:
                sequence.pending_tokens += 1

    def complete(self, work: Work) -> None:
        """The work was computed: its KV is in the pages, and the sequence may leave PREFILLING.

        What it sampled is known now, and the caller appends it.
        """
        sequence = work.sequence
        self._pages.advance(sequence, work.end)
        if work.samples:
            sequence.pending_tokens -= 1
        if sequence.status is SequenceStatus.PREFILLING:
            self._queued_prefill_tokens = None
            if work.end >= sequence.prefill_target:
                self._prefilled(sequence)

    def _prefilled(self, sequence: Sequence) -> None:
        if sequence.kind is RequestKind.PREFILL_ONLY:
            self._pages.pin(sequence)
            self._move(sequence, SequenceStatus.PINNED)
        else:
            self._move(sequence, SequenceStatus.RUNNING)

    def void(self, sequence: Sequence, step: int) -> None:
        """A step left the sequence's next token open: a later step that was built on it counts for nothing,
        and the position is computed again."""
        if sequence.last_step > step:
            sequence.void_step = sequence.last_step
        sequence.pending_tokens = 0
        sequence.planned_tokens = sequence.computed_tokens

    def chunks(self, sequence: Sequence) -> int:
        """Chunks of an admitted sequence that is prefilled here: at least one, even if nothing is missing."""
        missing = sequence.prefill_target - sequence.cached_tokens
        return max(1, -(-missing // self._settings.chunk_tokens))

    # ------------------------------------------------------------------------------------------- planning

    def _plan_decode(self, plan: StepPlan, sequence: Sequence) -> None:
        if not sequence.may_sample:
            return
        end = len(sequence.token_ids)
        if sequence.pending_tokens:
            end += sequence.pending_tokens
            if self._must_wait(sequence, end):
                return
        if end <= sequence.pages.end * self._page_size or self._make_room(plan, sequence, end):
            plan.work.append(Work(sequence, end - 1, 1, True))

    def _must_wait(self, sequence: Sequence, end: int) -> bool:
        """Whether the step in flight, which makes it ``end`` tokens, ends it or must be known first."""
        return (
            sequence.needs_known_tokens
            or end >= sequence.length_limit
            or end >= self._settings.max_sequence_tokens
        )

    def _plan_prefilling(self, plan: StepPlan, sequence: Sequence) -> None:
        """The next chunk; behind the last one, which may still be in flight, the first decode."""
        if sequence.planned_tokens < sequence.prefill_target:
            self._plan_chunk(plan, sequence)
        elif sequence.pending_tokens:
            self._plan_decode(plan, sequence)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        start = sequence.planned_tokens
        count = self._chunk_tokens(plan, sequence, start)
        if count is None or not self._make_room(plan, sequence, start + count):
            plan.prefill_blocked = True
            return
        plan.work.append(self._chunk(plan, sequence, start, count))

    def _chunk_tokens(self, plan: StepPlan, sequence: Sequence, start: int) -> int | None:
        """Tokens of the sequence's next chunk; None when this step has no room for it."""
        missing = sequence.prefill_target - start
        count = min(self._settings.chunk_tokens, missing)
        if count <= plan.budget_tokens:
            return count
        if sequence.kind is RequestKind.PREFILL_ONLY or plan.budget_tokens == 0:
            return None
        return plan.budget_tokens

    def _chunk(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> Work:
        plan.budget_tokens -= count
        last = start + count >= sequence.prefill_target
        if sequence.kind is not RequestKind.PREFILL_ONLY:
            return Work(sequence, start, count, samples=last)
        chunk = sequence.next_chunk
        sequence.next_chunk = chunk + 1
        return Work(sequence, start, count, samples=False, chunk=chunk, last_chunk=last)

    def _make_room(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Extend a sequence to ``end``, preempting from the back; False when it must sit this step out."""
        while not self._pages.can_extend(sequence, end):
            if self._pages.step_in_flight:
                self._drain = True
                return False
            victim = next(self._victims(sequence), None)
            if victim is None:
                return False
            plan.preempted.append((victim, victim.attempt))
            self.preempt(victim)
            if victim is sequence:
                return False
        self._pages.extend(sequence, end)
        return True

    def _victims(self, sequence: Sequence) -> Iterator[Sequence]:
        """Sequences that may be preempted for this one, last first; at the end itself."""
        for candidate in reversed(self._active):
            if candidate.status in _COMPUTING and candidate.kind is not RequestKind.PREFILL_ONLY:
                yield candidate
            if candidate is sequence:
                return

    # ------------------------------------------------------------------------------------------ admission

    def _admit_head(self, plan: StepPlan) -> bool:
        """Admit the head of the queue if everything it needs is there."""
        if self.count(*_COMPUTING, SequenceStatus.RESERVED) >= self._settings.max_batch_size:
            return False
        # Whoever waits for a compiler is not at the head of anything.
        sequence = next((waiting for waiting in self._queue if waiting.may_start), None)
        if sequence is None:
            return False
        hit = self._pages.find_hit(sequence)
        if sequence.request.shares_prompt:
            self._choose_kind(sequence, hit)
        if sequence.kind is RequestKind.REMOTE_KV:
            admitted = self._admit_remote(plan, sequence, hit)
        else:
            admitted = self._admit_prefill(plan, sequence, hit)
        if admitted:
            self.prefix_query_tokens += sequence.kv_target
            self.prefix_hit_tokens += hit.tokens
            plan.admitted.append(sequence)
        return admitted

    def _choose_kind(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Leave to a peer what a prompt lacks of whole pages that it was to share."""
        is_there = sequence.kv_target - hit.tokens < self._page_size
        sequence.kind = RequestKind.COLOCATED if is_there else RequestKind.REMOTE_KV
        self._queued_prefill_tokens = None

    def _admit_remote(self, plan: StepPlan, sequence: Sequence, hit: PrefixHit) -> bool:
        complete = hit.tokens == sequence.kv_target
        reservations = self.count(SequenceStatus.RESERVED)
        if not complete and reservations >= self._settings.max_reservations_waiting:
            return False
        if not self._pages.can_admit(sequence, hit, 0, self._spare()):
            return False
        self._pages.admit(sequence, hit, 0)
        self._activate(sequence, SequenceStatus.RUNNING if complete else SequenceStatus.RESERVED)
        if complete and sequence.may_sample:
            plan.work.append(Work(sequence, sequence.kv_target, 1, samples=True))
        return True

    def _admit_prefill(self, plan: StepPlan, sequence: Sequence, hit: PrefixHit) -> bool:
        if plan.prefill_blocked:
            return False
        count = self._chunk_tokens(plan, sequence, hit.tokens)
        if count is None or not self._pages.can_admit(sequence, hit, count, self._spare()):
            return False
        self._pages.admit(sequence, hit, count)
        sequence.next_chunk = 0
        self._activate(sequence, SequenceStatus.PREFILLING)
        plan.work.append(self._chunk(plan, sequence, hit.tokens, count))
        return True

    def _spare(self) -> int:
        """Full pages to leave for the next page of each sequence that decodes or soon will.

        Without them an admission would soon preempt a sequence that has more to lose than the newcomer.
        """
        return sum(s.status in _COMPUTING and s.kind is not RequestKind.PREFILL_ONLY for s in self._active)

    def _activate(self, sequence: Sequence, status: SequenceStatus) -> None:
        self._queue.remove(sequence)
        self._queued_prefill_tokens = None
        sequence.move(status)
        self._counts[status] += 1
        insort(self._active, sequence, key=lambda active: active.order)

    def _move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Change the status of an active sequence."""
        self._counts[sequence.status] -= 1
        sequence.move(status)
        self._counts[status] += 1
