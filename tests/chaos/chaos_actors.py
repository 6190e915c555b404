"""Hosts of workers and routers for a run with faults; imported by the deployment's processes.

Each works in its own network namespace and tells which requests it holds in which state. ``UnfencedDecode``
gives pages back at once though a peer may still write them: with it the run must fail.
"""

from __future__ import annotations

import os
import time
from collections import Counter

from chaos_network import enter
from chaos_pages import GivenUpPages
from chaos_plan import WRITE_DUE
from chaos_strikes import Strikes, decode_tables, prefill_tables, router_tables

from antiphon.cluster.actors import DecodeActor, PrefillActor, RouterActor, WorkerActor
from antiphon.protocol.identity import Topology, WorkerAddress


class Observed:
    """What the run asks of every process beyond what the supervisor does."""

    strikes = Strikes()
    """Of this process, which hosts one worker."""

    async def arm(self, state: str, number: int) -> None:
        """Let a signal strike this process when a request enters a state."""
        self.strikes.arm(state, number)

    async def disarm(self) -> None:
        """Take it back."""
        self.strikes.disarm()

    async def pid(self) -> int:
        """Whom to send signals to."""
        return os.getpid()

    async def states(self) -> dict[str, int]:
        """How many requests are in each state of each table that this process keeps."""
        raise NotImplementedError


class _InNamespace(Observed, WorkerActor):
    def _start(self, topology: Topology) -> WorkerAddress:
        self._address = enter(self._worker_id)
        return super()._start(topology)

    def _bind_host(self) -> str:
        return self._address

    def _engine_states(self) -> Counter[str]:
        snapshot = self._started()._engine.snapshot()
        return Counter(
            {
                "engine running": snapshot.running,
                "engine waiting": snapshot.waiting,
                "engine reserved": snapshot.awaiting_kv,
                "engine pinned": snapshot.pinned,
                "engine quarantined": snapshot.quarantined,
            }
        )

    async def counters(self) -> dict[str, int]:
        """Totals of the worker since it started."""
        return self._started().status().counters

    async def about(self, request_id: str) -> str:
        """All that the worker knows of one request."""
        dispatch = self._started()._dispatch
        ledger = self._started()._engine._ledger
        sequences = [
            f"{s.request.request_id} attempt {s.attempt} {s.status}"
            for s in (*ledger.scheduler.waiting, *ledger.scheduler.active)
            if s.request.request_id.startswith(request_id)
        ]
        known = [
            repr(one)[:600]
            for table in ("_requests", "_jobs")
            for key, one in getattr(dispatch, table, {}).items()
            if request_id in key
        ]
        held = getattr(dispatch, "_quarantined", set())
        return f"{self._worker_id}: engine {sequences}, dispatch {known}, quarantined {held}"


class ChaosPrefill(_InNamespace, PrefillActor):
    """A prefill worker."""

    def _start(self, topology: Topology) -> WorkerAddress:
        from antiphon.prefill_worker.dispatch import PrefillDispatch

        self.strikes.watch_all(prefill_tables())
        self.strikes.watch_call(WRITE_DUE, PrefillDispatch, "_ship")
        return super()._start(topology)

    async def states(self) -> dict[str, int]:
        if self._worker is None:
            return {}
        jobs = list(self._worker._dispatch._jobs.values())
        return dict(self._engine_states() + Counter(f"job {job.state}" for job in jobs))


class ChaosDecode(_InNamespace, DecodeActor):
    """A decode worker."""

    pages = GivenUpPages()

    def _start(self, topology: Topology) -> WorkerAddress:
        self.strikes.watch_all(decode_tables())
        self.pages.watch()
        return super()._start(topology)

    async def forget_given_up(self, writer: str) -> None:
        """See GivenUpPages."""
        self.pages.forget(writer)

    async def reused(self, writer: str) -> bool:
        """Whether a request runs on pages that this prefill worker may still write: never, with the fence."""
        return self.pages.reused(self._started()._engine, writer)

    async def states(self) -> dict[str, int]:
        if self._worker is None:
            return {}
        receives = list(self._worker._dispatch.receiver._receives.values())
        return dict(self._engine_states() + Counter(f"receive {one.state}" for one in receives))


class UnfencedDecode(ChaosDecode):
    """A decode worker that forgets who may still write its pages, and what may still be on its way."""

    def _start(self, topology: Topology) -> WorkerAddress:
        from antiphon.decode_worker.receiver import KvReceiver
        from antiphon.kv_transfer.arrivals import ArrivedConnections

        ArrivedConnections.sever = lambda connections, writer: True
        fenced = KvReceiver.abandon

        def abandon(receiver: KvReceiver, key: tuple[str, int]) -> bool:
            if fenced(receiver, key):
                receiver._leases._leases.pop(key, None)
                receiver._forget(key)
            return False

        KvReceiver.abandon = abandon
        return super()._start(topology)


class ChaosRouter(Observed, RouterActor):
    """A router."""

    async def start(self, topology: Topology) -> WorkerAddress:
        self.strikes.watch_all(router_tables())
        self._address = enter(self._worker_id)  # its HTTP server and its links live on this thread
        return await super().start(topology)

    def _reachable_url(self, url: str) -> str:
        return url.replace("0.0.0.0", self._address)

    async def states(self) -> dict[str, int]:
        if self._server is None or self._server._context is None:
            return {}
        context = self._server._context
        states = Counter(f"request {g.state}" for g in context.dispatcher._generations.all())
        states["request queued"] += context.admission.queued
        return dict(states)

    async def old(self, seconds: float) -> list[str]:
        """Requests that have been open for longer, with all that is known of them."""
        if self._server is None or self._server._context is None:
            return []
        now = time.monotonic()
        generations = self._server._context.dispatcher._generations.all()
        return [
            f"{g.request_id} {g.state} attempt {g.attempt} decode {g.decode_worker_id} prefill "
            f"{g.prefill_worker_id} failures {g.failures} age {now - g.received_at:.0f} s "
            f"tokens {len(g.output_token_ids)} closing {g.closing} ticket {g.ticket is not None} "
            f"via {g.workers_used[-6:]}"
            for g in generations
            if now - g.received_at > seconds
        ]

    async def counters(self) -> dict[str, int]:
        return {}
