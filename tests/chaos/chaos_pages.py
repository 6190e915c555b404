"""Pages of a decode worker that were given up while a writer had them, and whether they are in use again."""

from __future__ import annotations

from typing import Any


class GivenUpPages:
    """Of one decode worker, by the prefill worker that may still write them."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], frozenset[int]] = {}
        self._given_up: dict[str, frozenset[int]] = {}

    def watch(self) -> None:
        """Look at every reservation and at every attempt that is abandoned."""
        from antiphon.decode_worker.dispatch import DecodeDispatch
        from antiphon.decode_worker.receiver import KvReceiver

        on_reserved, abandon = DecodeDispatch.on_reserved, KvReceiver.abandon

        def watched_reserved(dispatch: Any, event: Any) -> None:
            self._of[event.request_id, event.attempt] = frozenset(event.full_pages)
            on_reserved(dispatch, event)

        def watched_abandon(receiver: Any, key: tuple[str, int]) -> bool:
            lease = receiver._leases.get(*key)
            if lease is not None:
                writer = lease.writer.worker_id
                pages = self._of.get(key, frozenset())
                self._given_up[writer] = self._given_up.get(writer, frozenset()) | pages
            return abandon(receiver, key)

        DecodeDispatch.on_reserved = watched_reserved  # type: ignore[method-assign]
        KvReceiver.abandon = watched_abandon  # type: ignore[method-assign]

    def forget(self, writer: str) -> None:
        """What this one could write until now."""
        self._given_up.pop(writer, None)

    def reused(self, engine: Any, writer: str) -> bool:
        """Whether a request that runs holds a page that this one may still write."""
        from antiphon.engine.sequence import SequenceStatus

        pages = self._given_up.get(writer, frozenset())
        active = list(engine._ledger.scheduler.active)
        running = [one for one in active if one.status is SequenceStatus.RUNNING]
        return any(pages.intersection(one.pages.full) for one in running)
