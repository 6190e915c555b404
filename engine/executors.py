"""Which executor an engine gets: decided once, from its settings."""

from __future__ import annotations

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.executor import Executor, StepExecutor
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.settings import EngineSettings
from antiphon.model.forward import LanguageModel


def make_executor(model: LanguageModel, kv_cache: PagedKvCache, settings: EngineSettings) -> Executor:
    """The plain executor, or the one that can have a step in flight while the next is launched."""
    if settings.overlap:
        return DeviceExecutor(model, kv_cache, settings)
    return StepExecutor(model, kv_cache, settings.layer_groups)
