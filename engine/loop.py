"""The engine's heartbeat: intake, schedule, execute, commit."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from antiphon.engine.events import EngineEvent, KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.requests import EngineRequest
from antiphon.engine.settings import EngineSettings
from antiphon.engine.snapshot import EngineSnapshot
from antiphon.model.forward import LanguageModel


class EngineLoop:
    """One engine: token ids in, token ids out.

    One thread, the engine thread, calls ``step``; every other method may be called from any thread. Commands
    are taken in the order in which they were given, at the start of a step and again before its outputs are
    committed, so an abort that arrives while a step computes wins over what that step produced.

    Every submitted request ends with exactly one ``SequenceFinished``.

    Args:
        model: writes KV into the pages that this engine plans; on a prefill worker it has no output projection.
        settings: sizes and bounds.
        device, kv_dtype: where the pages live and what they hold.
        on_scheduled: called on the engine thread after a step is planned and before it computes, with each
            PagesReserved and PrefillStarted of the step. ``step`` returns the same events later.
        on_kv_written: called on the engine thread while the step computes, right after the last layer of a
            layer group was issued. On a CUDA device the reader must order itself after the current stream.
            ``step`` returns the same events later.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: EngineSettings,
        *,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype = torch.float32,
        on_scheduled: Callable[[PagesReserved | PrefillStarted], None] | None = None,
        on_kv_written: Callable[[KvWritten], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError  # being written

    def step(self) -> list[EngineEvent]:
        """Run one step; returns its events in order. Does nothing, at once, when there is no work."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Hand in a request.

        Raises:
            RequestRejected: it can never run here (too long, bad ids or parameters, its id is live), or not
                now (queue full: ``retryable``).
        """
        raise NotImplementedError

    def abort(self, request_id: str, attempt_limit: int, *, writer_granted: bool = False) -> None:
        """End the request if it was submitted with an attempt up to ``attempt_limit``; else nothing happens.

        ``writer_granted`` says that a transport may still write (REMOTE_KV) or read (PREFILL_ONLY) pages of the
        sequence's current attempt: they go to quarantine until ``release_quarantined``.
        """
        raise NotImplementedError

    def kv_ready(self, request_id: str, attempt: int) -> None:
        """Every wanted position of this reservation was written; the sequence becomes runnable."""
        raise NotImplementedError

    def kv_lost(self, request_id: str, attempt: int) -> None:
        """The KV will not come and its writer certainly writes no more: reserve again with attempt + 1."""
        raise NotImplementedError

    def release(self, request_id: str, attempt: int) -> None:
        """The pages of a computed PREFILL_ONLY request were shipped; ends it with reason STOP."""
        raise NotImplementedError

    def release_quarantined(self, request_id: str, attempt: int) -> None:
        """No transport touches the pages of this ended attempt any more; they return to the pool."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether a step would do something now."""
        raise NotImplementedError

    def wait_for_work(self, timeout_s: float) -> bool:
        """Block until a step would do something, or the timeout; returns ``has_work()``."""
        raise NotImplementedError

    def snapshot(self) -> EngineSnapshot:
        """Counts as of the end of the last step."""
        raise NotImplementedError
