"""One request inside an engine: its tokens, its pages and where it is in its life."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

from antiphon.engine.grammar import OutputGrammar
from antiphon.engine.prefix_cache import chain_root, page_key
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.token_array import token_array
from antiphon.protocol.errors import IllegalTransition


class SequenceStatus(StrEnum):
    """Where a sequence is. The whole life of all three kinds of request::

        QUEUED --+--> PREFILLING --+--> RUNNING --------+--> FINISHED
                 |        |        +--> PINNED ---------+
                 |        |                 (release)   |
                 +--> RESERVED ----> RUNNING            |
                 |        |  (KV ready)  |              |
                 |        |              |              |
                 +--> RUNNING (nothing   |              |
                 |        |    missing)  |              |
                 |        v              v              |
                 +---- PREEMPTED <-------+              |
                       (KV lost, or no pages left)      |
                                                        |
        any of them ------- abort, deadline, error -----+

    COLOCATED runs QUEUED, PREFILLING, RUNNING. PREFILL_ONLY runs QUEUED, PREFILLING, PINNED. REMOTE_KV runs
    QUEUED, RESERVED, RUNNING, and skips RESERVED when no KV is missing. PREEMPTED is QUEUED once more, at the
    head of the queue and one attempt later; a PREFILL_ONLY sequence is never preempted.
    """

    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PINNED = "pinned"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_STARTS = frozenset(
    {
        SequenceStatus.RESERVED,
        SequenceStatus.PREFILLING,
        SequenceStatus.RUNNING,
        SequenceStatus.FINISHED,
    }
)
LEGAL_MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.QUEUED: _STARTS,
    SequenceStatus.PREEMPTED: _STARTS,
    SequenceStatus.RESERVED: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PREFILLING: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.PINNED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PINNED: frozenset({SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}
"""The one table of legal moves."""


@dataclass(slots=True)
class PageTable:
    """A sequence's pages: ``full[i]`` is logical page i, ``sliding[i]`` is page ``sliding_first + i``.

    Pages before ``sliding_first`` fell out of the window and are no longer the sequence's. A table only ever
    grows at its end and shrinks at its front; a sequence that loses its pages gets a new one.
    """

    full: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)
    sliding_first: int = 0

    @property
    def end(self) -> int:
        """Logical pages up to which both groups have one."""
        return min(len(self.full), self.sliding_first + len(self.sliding))


class OutputTokens(Many[int]):
    """A view of a sequence's output tokens: no copy of a long text in every step."""

    def __init__(self, token_ids: array[int], prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._prompt_tokens = prompt_tokens

    def __len__(self) -> int:
        return len(self._token_ids) - self._prompt_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._token_ids[self._prompt_tokens + i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._token_ids[self._prompt_tokens + index % len(self)]


class Sequence:
    """State of one request. ``token_ids`` is the prompt and every output token so far.

    ``computed_tokens`` positions have their KV in ``pages``. For a RESERVED sequence that is what the prefix
    cache gave; the rest up to ``kv_target`` is a peer's to write.

    A step is planned before the step in flight is committed, so what is planned may lead what is known: the
    ``pending_tokens`` tokens that planned steps sample follow ``token_ids``, and ``planned_tokens`` positions
    will hold KV when every planned step has been computed. Between two steps of a loop that does not overlap
    nothing is pending.
    """

    def __init__(
        self,
        request: EngineRequest,
        arrival: int,
        submitted_s: float,
        grammar: OutputGrammar | None = None,
        token_ids: array[int] | None = None,
    ) -> None:
        """``token_ids`` are those of the request, where somebody has made an array of them already."""
        self.request = request
        self.kind = request.kind
        """Which part of the life this engine runs."""
        self.grammar = grammar
        self.arrival = arrival
        """Rank of submission: smaller came first. Kept over preemptions."""
        self.attempt = request.attempt
        if token_ids is None:
            token_ids = token_array(request.prompt_token_ids, request.output_token_ids)
        self.token_ids = token_ids
        self.prompt_tokens = len(request.prompt_token_ids)
        sampling = request.sampling
        self.length_limit = self.prompt_tokens + (0 if sampling is None else sampling.max_tokens)
        """Tokens, prompt included, at which the request is complete."""
        self.needs_known_tokens = sampling is not None and bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        """Its next token can only be sampled once all those before it are known on the host."""
        self.sorts_whole_row = False
        """Its best candidates did not settle a draw once: from then on its logits are sorted whole."""
        self.status = SequenceStatus.QUEUED
        self.pages = PageTable()
        self.computed_tokens = 0
        self.planned_tokens = 0
        self.pending_tokens = 0
        """Tokens that planned steps sample and that are not known yet: 0 or 1 when a step is planned."""
        self.last_step = 0
        """The last planned step that touches this sequence's pages."""
        self.void_step = 0
        """A planned step whose result for this sequence is dropped: it was built on a wrong token."""
        self.cached_tokens = 0
        self.published_pages = 0
        """Logical pages whose content has been offered to the prefix cache."""
        self.preemptions = 0
        self.next_chunk = 0
        """Chunk of a PREFILL_ONLY request to compute next."""
        self.submitted_s = submitted_s
        self.queued_s = submitted_s
        """When it last entered the queue."""
        self.deadline_s = None if request.deadline_s is None else submitted_s + request.deadline_s
        self.started_s: float | None = None
        """When its first step was planned (of the present attempt)."""
        self.runnable_s: float | None = None
        """When it first could sample."""
        self.first_token_s: float | None = None
        self._page_keys: list[bytes] = []

    def move(self, status: SequenceStatus) -> None:
        """Change the status.

        Raises:
            IllegalTransition: the table has no such move.
        """
        if status not in LEGAL_MOVES[self.status]:
            raise IllegalTransition(
                f"request {self.request.request_id} attempt {self.attempt}: {self.status} -> {status}"
            )
        self.status = status

    @property
    def may_sample(self) -> bool:
        """Whether what its next token must be is known: a grammar takes a moment to compile."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def may_start(self) -> bool:
        """Whether it may hold pages: the KV of a peer can come while its grammar is compiled."""
        return self.kind is RequestKind.REMOTE_KV or self.may_sample

    @property
    def output(self) -> OutputTokens:
        """Output tokens so far, those of earlier attempts included; grows with the sequence."""
        return OutputTokens(self.token_ids, self.prompt_tokens)

    @property
    def output_tokens(self) -> int:
        """How many output tokens there are so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def kv_target(self) -> int:
        """Positions whose KV must be there before the last token runs as a decode step."""
        return len(self.token_ids) - 1

    @property
    def prefill_target(self) -> int:
        """Positions that this engine computes before the sequence leaves PREFILLING."""
        return self.kv_target if self.kind is RequestKind.PREFILL_ONLY else len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first among sequences that hold pages; the largest is preempted first."""
        return self.request.priority, self.arrival

    @property
    def queue_order(self) -> tuple[int, bool, int]:
        """Who goes first in the queue: recomputation stands at the head of its priority."""
        first_time = self.status is not SequenceStatus.PREEMPTED and not self.request.output_token_ids
        return self.request.priority, first_time, self.arrival

    @property
    def named_pages(self) -> int:
        """Whole pages, from the first, that have their key."""
        return len(self._page_keys)

    def name_pages(self, pages: int, page_size: int) -> None:
        """Compute the keys of the first ``pages`` whole pages, as far as they are not there."""
        while len(self._page_keys) < pages:
            self._name_next_page(page_size)

    def page_keys(self, pages: int, page_size: int) -> list[bytes]:
        """Prefix keys of the first ``pages`` whole pages; computed once, as the sequence grows."""
        self.name_pages(pages, page_size)
        return self._page_keys[:pages]

    def each_page_key(self, pages: int, page_size: int) -> Iterator[bytes]:
        """The same one by one, computed when it is asked for: of a prompt whose first page is found nowhere
        the other keys can wait."""
        for page in range(pages):
            if page == len(self._page_keys):
                self._name_next_page(page_size)
            yield self._page_keys[page]

    def _name_next_page(self, page_size: int) -> None:
        keys = self._page_keys
        previous = keys[-1] if keys else chain_root(self.request.cache_salt)
        first = len(keys) * page_size
        keys.append(page_key(previous, self.token_ids[first : first + page_size]))
