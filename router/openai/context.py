"""What every endpoint works with; made once per router."""

from __future__ import annotations

import time
from dataclasses import dataclass

from antiphon.configs.front_end import RouterConfig
from antiphon.router.admission import Admission
from antiphon.router.dispatch.dispatcher import Dispatcher
from antiphon.router.encoding_pool import EncodingPool
from antiphon.router.formatter import ChatFormatter
from antiphon.router.key_limits import KeyLimits
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.errors import model_not_found
from antiphon.router.openai.refusals import REFUSALS, note_refusal, refusal_of
from antiphon.router.openai.response_store import ResponseStore
from antiphon.router.served_model import ServedModel
from antiphon.telemetry.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts of one router."""

    config: RouterConfig
    model: ServedModel
    formatter: ChatFormatter
    dispatcher: Dispatcher
    admission: Admission
    metrics: RouterMetrics
    store: ResponseStore
    key_limits: KeyLimits
    tracer: Tracer
    encoding: EncodingPool

    def check_room(
        self, choices: int, priority: int | None, timeout_s: float | None, received_at: float
    ) -> None:
        """Turn a request away before its prompt is rendered, if admission would.

        Raises:
            ApiError: 429 or 503, with Retry-After.
        """
        timeout_s = timeout_s or self.config.request_timeout_s
        try:
            left_s = max(timeout_s - (time.monotonic() - received_at), 0.0)
            self.admission.check(choices, priority or 0, left_s)
        except REFUSALS as error:
            note_refusal(self.metrics, error, received_at)
            raise refusal_of(error)[1] from error

    def check_model(self, name: str) -> None:
        """Raise 404 unless this model is served."""
        check_model(self.model, name)


def check_model(model: ServedModel, name: str) -> None:
    """Raise 404 unless this model is served."""
    if name != model.name:
        raise model_not_found(name)
