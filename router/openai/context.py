"""What every endpoint works with; made once per router."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.configs.schema import RouterConfig
from antiphon.router.admission import Admission
from antiphon.router.dispatch.dispatcher import Dispatcher
from antiphon.router.formatter import ChatFormatter
from antiphon.router.key_limits import KeyLimits
from antiphon.router.metrics import RouterMetrics
from antiphon.router.openai.errors import model_not_found
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

    def check_model(self, name: str) -> None:
        """Raise 404 unless this model is served."""
        if name != self.model.name:
            raise model_not_found(name)
