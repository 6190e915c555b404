"""The fake model and engines on it, for tests of the engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.engine.loop import EngineLoop

sys.path.insert(0, str(Path(__file__).with_name("fakes")))

from fake_engines import (
    MODES,
    LazyRuntime,
    Transcript,
    copy_page,
    held_pages,
    make_engine,
    make_request,
    prompt_of,
    run,
    settings,
)
from fake_model import PAGE, VOCABULARY, WINDOW, FakeModel, fake_config
from split_pair import SplitPair


@dataclass(frozen=True)
class EngineKit:
    """All of it, handed to tests as one fixture."""

    FakeModel = FakeModel
    LazyRuntime = LazyRuntime
    MODES = MODES
    SplitPair = SplitPair
    Transcript = Transcript
    VOCABULARY = VOCABULARY
    WINDOW = WINDOW
    PAGE = PAGE
    fake_config = staticmethod(fake_config)
    settings = staticmethod(settings)
    request = staticmethod(make_request)
    prompt_of = staticmethod(prompt_of)
    run = staticmethod(run)
    held_pages = staticmethod(held_pages)
    copy_page = staticmethod(copy_page)

    engine = staticmethod(make_engine)

    @staticmethod
    def loop(mode: str = "plain", **changes: object) -> EngineLoop:
        """An engine on the fake model."""
        return make_engine(mode, FakeModel(), settings(**changes))


@pytest.fixture(scope="session")
def kit() -> EngineKit:
    """The fake model, small engines and their drivers."""
    return EngineKit()
