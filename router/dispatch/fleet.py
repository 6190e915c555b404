"""The workers as the router knows them: links, load, pairings, circuits. State only; no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from antiphon.protocol.identity import Role, WorkerAddress
from antiphon.protocol.messages import LoadReport
from antiphon.router.dispatch.circuit import Circuit
from antiphon.router.dispatch.placement import DecodeCandidate, PrefillCandidate
from antiphon.router.dispatch.prefix_index import PrefixIndex
from antiphon.router.metrics import RouterMetrics

PREFIX_INDEX_PAGES = 1 << 16
"""Page keys remembered per worker; about 8 MB of Python objects."""


@dataclass(slots=True)
class WorkerView:
    """One life of one worker. ``sent_*`` count what was sent since its last load report."""

    address: WorkerAddress
    report: LoadReport | None = None
    circuit: Circuit = field(default_factory=Circuit)
    own_requests: set[str] = field(default_factory=set)
    """Ids of this router's generations that the worker holds."""
    own_at_report: int = 0
    sent_pages: int = 0
    sent_tokens: int = 0

    @property
    def accepts_work(self) -> bool:
        """It has reported, and is not draining."""
        return self.report is not None and not self.report.draining

    @property
    def active(self) -> int:
        """Requests there, other routers' included as of the last report."""
        if self.report is None:
            return len(self.own_requests)
        others = max(self.report.running + self.report.waiting - self.own_at_report, 0)
        return others + len(self.own_requests)


class Fleet:
    """All linked workers of a deployment."""

    def __init__(self, metrics: RouterMetrics, page_size_tokens: int) -> None:
        self._metrics = metrics
        self._page_size_tokens = page_size_tokens
        self._workers: dict[str, WorkerView] = {}
        self._prefixes = PrefixIndex(PREFIX_INDEX_PAGES)

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str | None) -> WorkerView | None:
        """The current life of a worker, if it is linked."""
        return self._workers.get(worker_id) if worker_id is not None else None

    def add(self, address: WorkerAddress) -> None:
        """A worker's link came up. Its caches are empty as far as anyone knows."""
        self._prefixes.forget(address.worker_id)
        self._workers[address.worker_id] = WorkerView(address)
        self._metrics.worker_up.labels(address.worker_id, address.role).set(1)
        self._metrics.worker_circuit_state.labels(address.worker_id, address.role).set(0)

    def remove(self, worker_id: str, epoch: int) -> WorkerView | None:
        """A worker's life ended; None when another life has replaced it already."""
        view = self._workers.get(worker_id)
        if view is None or view.address.epoch != epoch:
            return None
        del self._workers[worker_id]
        self._prefixes.forget(worker_id)
        self._metrics.worker_gone(worker_id, view.address.role)
        self._metrics.ready_pairs.set(len(self.pairs()))
        return view

    def take_report(self, worker_id: str, report: LoadReport) -> None:
        """Replace what is known about a worker's load."""
        view = self._workers.get(worker_id)
        if view is None or report.epoch != view.address.epoch:
            return
        view.report = report
        view.own_at_report = len(view.own_requests)
        view.sent_pages = view.sent_tokens = 0
        role = view.address.role
        self._metrics.worker_active.labels(worker_id, role).set(report.running + report.waiting)
        self._metrics.worker_queued_tokens.labels(worker_id, role).set(report.queued_prefill_tokens)
        used = 1 - report.free_pages / report.total_pages if report.total_pages else 0.0
        self._metrics.worker_kv_usage.labels(worker_id, role).set(used)
        self._metrics.ready_pairs.set(len(self.pairs()))

    def unpair(self, prefill_id: str, decode_id: str | None) -> None:
        """The prefill worker has no connection to the decode worker until it reports one again."""
        view = self._workers.get(prefill_id)
        if view is not None and view.report is not None and decode_id is not None:
            peers = {peer: epoch for peer, epoch in view.report.kv_peers.items() if peer != decode_id}
            view.report = msgspec.structs.replace(view.report, kv_peers=peers)
            self._metrics.ready_pairs.set(len(self.pairs()))

    def pairs(self) -> list[tuple[str, str]]:
        """(prefill, decode) ids that have moved a test page and both take work.

        A decode worker that computes every prompt itself is a pair with itself.
        """
        found = [
            (view.address.worker_id, view.address.worker_id)
            for view in self._of_role(Role.DECODE)
            if view.accepts_work and view.report is not None and view.report.computes_prompts
        ]
        for prefill in self._of_role(Role.PREFILL):
            if not prefill.accepts_work or prefill.report is None:
                continue
            for decode_id, epoch in prefill.report.kv_peers.items():
                decode = self._workers.get(decode_id)
                if decode is not None and decode.address.epoch == epoch and decode.accepts_work:
                    found.append((prefill.address.worker_id, decode_id))
        return found

    def decode_candidates(
        self, prefix_keys: list[bytes], excluded: Collection[str], now: float
    ) -> list[DecodeCandidate]:
        """Decode workers that have a prefill worker to work with, or need none."""
        usable = {decode for _, decode in self.pairs()}
        return [
            DecodeCandidate(
                worker_id=view.address.worker_id,
                free_pages=(view.report.free_pages if view.report else 0) - view.sent_pages,
                active=view.active,
                cached_tokens=self._cached_tokens(view.address.worker_id, prefix_keys),
            )
            for view in self._steer(usable, excluded, now)
        ]

    def prefill_candidates(
        self, decode_worker_id: str, prefix_keys: list[bytes], excluded: Collection[str], now: float
    ) -> list[PrefillCandidate]:
        """Prefill workers that can ship to this decode worker."""
        usable = {prefill for prefill, decode in self.pairs() if prefill != decode == decode_worker_id}
        return [
            PrefillCandidate(
                worker_id=view.address.worker_id,
                queued_tokens=(view.report.queued_prefill_tokens if view.report else 0) + view.sent_tokens,
                cached_tokens=self._cached_tokens(view.address.worker_id, prefix_keys),
            )
            for view in self._steer(usable, excluded, now)
        ]

    def _steer(self, usable: set[str], excluded: Collection[str], now: float) -> list[WorkerView]:
        """Workers to choose from: those whose circuit lets work through, or all when none does.

        A circuit steers work to where it succeeds. With nowhere else to go it must not turn one bad request
        into an outage.
        """
        views = [self._workers[worker_id] for worker_id in sorted(usable - set(excluded))]
        return [view for view in views if view.circuit.allows(now)] or views

    def pages_for(self, tokens: int) -> int:
        """Pages of the full-attention group that so many tokens take."""
        return -(-tokens // self._page_size_tokens)

    def assign(self, worker_id: str, request_id: str, now: float, *, pages: int = 0, tokens: int = 0) -> None:
        """A generation was sent to a worker."""
        view = self._workers[worker_id]
        view.own_requests.add(request_id)
        view.sent_pages += pages
        view.sent_tokens += tokens
        view.circuit.sent(now)
        self._show_circuit(view, now)

    def release(self, worker_id: str | None, request_id: str) -> None:
        """The worker does not hold the generation any more."""
        if (view := self.get(worker_id)) is not None:
            view.own_requests.discard(request_id)

    def succeeded(self, worker_id: str | None, prefix_keys: list[bytes], now: float) -> None:
        """The worker did its part; it holds the prompt's pages now."""
        if (view := self.get(worker_id)) is None:
            return
        view.circuit.succeeded()
        self._show_circuit(view, now)
        self._prefixes.record(view.address.worker_id, prefix_keys)

    def failed(self, worker_id: str | None, now: float) -> None:
        """The worker failed at its part."""
        if (view := self.get(worker_id)) is None:
            return
        view.circuit.failed(now)
        self._show_circuit(view, now)

    def _show_circuit(self, view: WorkerView, now: float) -> None:
        labels = (view.address.worker_id, view.address.role)
        self._metrics.worker_circuit_state.labels(*labels).set(view.circuit.state(now))

    def _cached_tokens(self, worker_id: str, prefix_keys: list[bytes]) -> int:
        return self._page_size_tokens * self._prefixes.cached_pages(worker_id, prefix_keys)

    def _of_role(self, role: Role) -> list[WorkerView]:
        return [w for w in self._workers.values() if w.address.role is role]
