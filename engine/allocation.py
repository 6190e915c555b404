"""Which pages each sequence holds, in both groups: admission, growth, the sliding window, quarantine.

Who owns a sequence's logical pages, with c = computed positions, k = tokens of the prefix hit, t = the
positions whose KV must be there, S the page size and W the window:

    group    logical pages          owner
    full     0 .. k/S               shared with the prefix cache (hold USED)
    full     k/S .. ceil(t/S)       the sequence (USED, or RESERVED while a peer writes them)
    full     from ceil(t/S)         the sequence: output, headroom
    sliding  before (c - W)/S       nobody: dropped, cached cold when complete
    sliding  (c - W)/S .. c/S       the sequence, perhaps shared
    sliding  from c/S               the sequence: the chunk or output being computed

A whole page becomes findable in ``advance``; where that waits for its key, the window leaves nothing behind
meanwhile. In PINNED every hold is of kind PINNED. ``holds`` is the one place that says all this to the
account.

A sequence may end while a planned step still touches its pages. Those holds stay until ``retire`` says that
the step is over, so that nobody, a peer least of all, writes into a page that a running step reads or writes.
The pages that ``advance`` leaves behind need no such wait: a step planned for positions from c on reads
nothing before the window that ends at c.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from antiphon.engine.pages import AccountingError, Hold, PagePool
from antiphon.engine.prefix_cache import PrefixCache, PrefixHit, window_first_page
from antiphon.engine.requests import RequestKind
from antiphon.engine.sequence import PageTable, Sequence, SequenceStatus
from antiphon.engine.settings import EngineSettings

FULL = "full"
SLIDING = "sliding"
PAGES_NAMED_A_STEP = 256
"""Pages that get their keys behind the launch of one step: 0.3 ms of the host, which a decode step outlasts,
and twice what a chunk of 8,192 tokens completes of pages of 64, so that the names stay ahead."""


class SequencePages:
    """Moves pages between the pools and the sequences; the only caller of the pools' commands."""

    def __init__(self, settings: EngineSettings) -> None:
        self._page_size = settings.page_size_tokens
        self._window = settings.window_tokens
        self._settings = settings
        self.full = PagePool(settings.full_pages)
        self.sliding = PagePool(settings.sliding_pages)
        self.prefix = PrefixCache(
            self.full,
            self.sliding,
            page_size=settings.page_size_tokens,
            window=settings.window_tokens,
            enabled=settings.prefix_cache,
        )
        self._quarantine: dict[tuple[str, int], dict[str, list[int]]] = {}
        self.planned_step = 0
        """Number of the last planned step; counts up."""
        self.retired_step = 0
        """Number of the last step that is over: neither the device nor the host touches its pages."""
        self._retiring: deque[tuple[int, str, list[int], Hold]] = deque()
        """Holds of ended sequences, with the step that they wait for."""
        self._unnamed: deque[Sequence] = deque()
        """Admitted sequences whose whole pages do not all have keys, in the order of admission."""

    # ----------------------------------------------------------------------------------------- admission

    def find_hit(self, sequence: Sequence) -> PrefixHit:
        """The cached prefix that this sequence could start from; its last token is always computed."""
        if not self.prefix.enabled:
            return PrefixHit(0, (), (), 0)
        keys = sequence.each_page_key(sequence.kv_target // self._page_size, self._page_size)
        return self.prefix.longest_hit(keys)

    def name_pages(self) -> bool:
        """Compute keys of up to ``PAGES_NAMED_A_STEP`` whole pages of admitted sequences; says whether any
        lacked one.

        Nobody waits for it here while the device computes.
        """
        left = PAGES_NAMED_A_STEP
        while self._unnamed and left:
            sequence = self._unnamed[0]
            if sequence.status is not SequenceStatus.FINISHED:
                whole = len(sequence.token_ids) // self._page_size
                named = sequence.named_pages
                sequence.name_pages(min(whole, named + left), self._page_size)
                left -= sequence.named_pages - named
                if sequence.named_pages < whole:
                    break
            self._unnamed.popleft()
        return left < PAGES_NAMED_A_STEP

    def can_admit(self, sequence: Sequence, hit: PrefixHit, first_chunk: int, spare: int) -> bool:
        """Whether ``admit`` would find enough pages and leave ``spare`` full ones for those who run."""
        table, new_full, new_sliding = self._admission(sequence, hit, first_chunk)
        fits = new_full + spare <= self.full.available_beside(table.full)
        return fits and new_sliding <= self.sliding.available_beside(table.sliding)

    def admit(self, sequence: Sequence, hit: PrefixHit, first_chunk: int) -> None:
        """Give a queued sequence its pages: the hit's, shared, and new ones.

        A REMOTE_KV sequence gets all of its KV and headroom (RESERVED unless nothing is missing); the others
        get all full pages of the prompt, and sliding pages for ``first_chunk`` tokens behind the hit.
        """
        table, new_full, new_sliding = self._admission(sequence, hit, first_chunk)
        for pool, shared in ((self.full, table.full), (self.sliding, table.sliding)):
            pool.share(shared)
        remote = sequence.kind is RequestKind.REMOTE_KV and hit.tokens < sequence.kv_target
        hold = Hold.RESERVED if remote else Hold.USED
        table.full += self.full.allocate(new_full, hold)
        table.sliding += self.sliding.allocate(new_sliding, hold)
        sequence.pages = table
        sequence.computed_tokens = sequence.planned_tokens = sequence.cached_tokens = hit.tokens
        sequence.published_pages = hit.tokens // self._page_size
        if self.prefix.enabled:
            self._unnamed.append(sequence)

    def _admission(self, sequence: Sequence, hit: PrefixHit, first_chunk: int) -> tuple[PageTable, int, int]:
        """The shared part of the page table, and how many new full and sliding pages follow it."""
        if sequence.kind is RequestKind.REMOTE_KV:
            full_end = sliding_end = self._pages(self._reservation_end(sequence))
            first = window_first_page(sequence.kv_target, self._window, self._page_size)
        else:
            full_end = self._pages(sequence.prefill_target)
            sliding_end = self._pages(hit.tokens + first_chunk)
            first = window_first_page(hit.tokens, self._window, self._page_size)
        cut = hit.tokens // self._page_size
        shared_sliding = hit.sliding[max(0, first - hit.sliding_first) :] if cut > first else ()
        table = PageTable(list(hit.full), list(shared_sliding), first)
        return table, full_end - cut, sliding_end - max(first, cut)

    def _reservation_end(self, sequence: Sequence) -> int:
        """Positions reserved for a REMOTE_KV sequence: its KV, its last token and headroom for output."""
        sampling = sequence.request.sampling
        most = len(sequence.request.prompt_token_ids) + (sampling.max_tokens if sampling else 1) - 1
        wished = sequence.kv_target + max(1, self._settings.headroom_tokens)
        return max(sequence.kv_target + 1, min(wished, most, self._settings.max_sequence_tokens))

    # ------------------------------------------------------------------------------------- while computing

    def can_extend(self, sequence: Sequence, end: int) -> bool:
        """Whether ``extend`` would find enough pages."""
        new_full, new_sliding = self._growth(sequence, end)
        return new_full <= self.full.available and new_sliding <= self.sliding.available

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give a computing sequence pages up to position ``end``."""
        new_full, new_sliding = self._growth(sequence, end)
        sequence.pages.full += self.full.allocate(new_full, Hold.USED)
        sequence.pages.sliding += self.sliding.allocate(new_sliding, Hold.USED)

    def _growth(self, sequence: Sequence, end: int) -> tuple[int, int]:
        table, pages = sequence.pages, self._pages(end)
        full = max(0, pages - len(table.full))
        return full, max(0, pages - table.sliding_first - len(table.sliding))

    def advance(self, sequence: Sequence, computed: int) -> None:
        """The positions before ``computed`` hold KV now: publish whole pages, leave the window behind."""
        sequence.computed_tokens = computed
        if computed // self._page_size > sequence.published_pages:
            self._publish(sequence)
            if self.prefix.enabled and sequence.published_pages < computed // self._page_size:
                return  # the window's pages are yet to be published
        table = sequence.pages
        first = window_first_page(computed, self._window, self._page_size)
        passed = first - table.sliding_first
        if passed > 0:
            self.sliding.drop(table.sliding[:passed], Hold.USED, cold=True)
            del table.sliding[:passed]
            table.sliding_first = first

    def receive(self, sequence: Sequence) -> None:
        """A peer wrote every wanted position of a RESERVED sequence."""
        for group, pages in self._reserved(sequence).items():
            self.pool(group).convert(pages, Hold.RESERVED, Hold.USED)
        # Published with the first step, in ``advance``.
        sequence.computed_tokens = sequence.planned_tokens = sequence.kv_target

    def pin(self, sequence: Sequence) -> None:
        """A PREFILL_ONLY sequence is computed: its pages stay for the transport."""
        self.full.convert(sequence.pages.full, Hold.USED, Hold.PINNED)
        self.sliding.convert(sequence.pages.sliding, Hold.USED, Hold.PINNED)

    def _publish(self, sequence: Sequence) -> None:
        """Make complete pages findable. A chunk's are named here where they are not; of a peer's KV, which
        may complete a whole prompt at once, they follow in later steps, as they get their names."""
        whole = sequence.computed_tokens // self._page_size
        begin = sequence.published_pages
        if sequence.kind is RequestKind.REMOTE_KV:
            whole = min(whole, max(sequence.named_pages, begin + 1))
        if not self.prefix.enabled or begin >= whole:
            return
        keys, table = sequence.page_keys(whole, self._page_size), sequence.pages
        self.prefix.publish(keys[begin:], table.full[begin:whole], sliding=False)
        first, offset = max(begin, table.sliding_first), table.sliding_first
        if first < whole:
            self.prefix.publish(keys[first:], table.sliding[first - offset : whole - offset], sliding=True)
        sequence.published_pages = whole

    # ----------------------------------------------------------------------------------------- giving back

    def distrust(self, sequence: Sequence) -> None:
        """The KV of this sequence is broken: no later prompt may start from its pages."""
        self.full.forget(sequence.pages.full)
        self.sliding.forget(sequence.pages.sliding)

    def release(self, sequence: Sequence) -> None:
        """Take every page back from a sequence that leaves its state for PREEMPTED or FINISHED.

        They return to the pools when the last step that touches them has retired.
        """
        for group, pages, hold in self._holds_by_kind(sequence):
            # The end of a prefix is evicted before its beginning, which more prompts share.
            last_first = pages[::-1]
            if sequence.last_step <= self.retired_step:
                self.pool(group).drop(last_first, hold)
            elif pages:
                self._retiring.append((sequence.last_step, group, last_first, hold))
        sequence.pages = PageTable()
        sequence.computed_tokens = sequence.planned_tokens = sequence.pending_tokens = 0

    def retire(self, step: int) -> None:
        """A step, and every one before it, is over: return what waited for it."""
        self.retired_step = step
        for _ in range(len(self._retiring)):
            item = self._retiring.popleft()
            last_step, group, pages, hold = item
            if last_step <= step:
                self.pool(group).drop(pages, hold)
            else:
                self._retiring.append(item)

    @property
    def step_in_flight(self) -> bool:
        """Whether a planned step has not retired."""
        return self.planned_step > self.retired_step

    def quarantine(self, sequence: Sequence) -> bool:
        """As ``release``, but pages that a transport may still touch are set aside; says whether any were.

        Of a reservation those are the pages that a peer was told to write; of any other sequence all of them.
        """
        name = sequence.request.request_id, sequence.attempt
        if name in self._quarantine:
            raise AccountingError(f"request {name[0]} attempt {name[1]} is in quarantine already")
        if sequence.status is SequenceStatus.RESERVED:
            kept = self.missing(sequence)
        else:
            kept = {FULL: list(sequence.pages.full), SLIDING: list(sequence.pages.sliding)}
        for group, pages in kept.items():
            self.pool(group).quarantine(pages)
        self.release(sequence)
        if not any(kept.values()):
            return False
        self._quarantine[name] = kept
        return True

    def release_quarantined(self, request_id: str, attempt: int) -> bool:
        """Return an ended attempt's pages to the pool; False when none are set aside under that name."""
        kept = self._quarantine.pop((request_id, attempt), None)
        if kept is None:
            return False
        for group, pages in kept.items():
            self.pool(group).drop(reversed(pages), Hold.QUARANTINED)
        return True

    @property
    def quarantined_count(self) -> int:
        """How many ended attempts have pages set aside."""
        return len(self._quarantine)

    # --------------------------------------------------------------------------------------------- account

    def holds(self, sequence: Sequence) -> Iterator[tuple[str, int, Hold]]:
        """Every hold of a sequence: (group, page, kind)."""
        for group, pages, hold in self._holds_by_kind(sequence):
            for page in pages:
                yield group, page, hold

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Balance both pools against the sequences and the quarantine.

        Raises:
            AccountingError: they differ.
        """
        expected: dict[str, Counter[tuple[int, Hold]]] = {FULL: Counter(), SLIDING: Counter()}
        for sequence in sequences:
            for group, page, hold in self.holds(sequence):
                expected[group][page, hold] += 1
        for kept in self._quarantine.values():
            for group, pages in kept.items():
                expected[group].update((page, Hold.QUARANTINED) for page in pages)
        for _, group, pages, hold in self._retiring:
            expected[group].update((page, hold) for page in pages)
        self.full.check(expected[FULL])
        self.sliding.check(expected[SLIDING])

    def pool(self, group: str) -> PagePool:
        """The pool of ``full`` or ``sliding``."""
        return self.full if group == FULL else self.sliding

    def missing(self, sequence: Sequence) -> dict[str, list[int]]:
        """The pages that a peer must write, by group: those of ``_reserved`` without the headroom."""
        if sequence.cached_tokens == sequence.kv_target:
            return {FULL: [], SLIDING: []}
        own, end = self._reserved(sequence), self._pages(sequence.kv_target)
        return {
            FULL: own[FULL][: end - sequence.cached_tokens // self._page_size],
            SLIDING: own[SLIDING][: end - self.first_missing_sliding(sequence)],
        }

    def first_missing_sliding(self, sequence: Sequence) -> int:
        """The logical page of the first sliding page that is not shared."""
        return max(sequence.pages.sliding_first, sequence.cached_tokens // self._page_size)

    def window_first(self, position: int) -> int:
        """The first logical page of the window before ``position``."""
        return window_first_page(position, self._window, self._page_size)

    def _reserved(self, sequence: Sequence) -> dict[str, list[int]]:
        """The pages of a RESERVED sequence that are not shared."""
        cut, table = sequence.cached_tokens // self._page_size, sequence.pages
        return {
            FULL: table.full[cut:],
            SLIDING: table.sliding[max(0, cut - table.sliding_first) :],
        }

    def _holds_by_kind(self, sequence: Sequence) -> list[tuple[str, list[int], Hold]]:
        table = sequence.pages
        if sequence.status is SequenceStatus.RESERVED:
            own = self._reserved(sequence)
            shared_full = table.full[: len(table.full) - len(own[FULL])]
            shared_sliding = table.sliding[: len(table.sliding) - len(own[SLIDING])]
            return [
                (FULL, own[FULL], Hold.RESERVED),
                (SLIDING, own[SLIDING], Hold.RESERVED),
                (FULL, shared_full, Hold.USED),
                (SLIDING, shared_sliding, Hold.USED),
            ]
        kind = Hold.PINNED if sequence.status is SequenceStatus.PINNED else Hold.USED
        return [(FULL, table.full, kind), (SLIDING, table.sliding, kind)]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
