"""Stand-ins for processes, found by tests and by the processes that they start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from antiphon.cluster import member

sys.path.insert(0, str(Path(__file__).with_name("stand_ins")))


@pytest.fixture
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives follow one another at once."""
    monkeypatch.setattr(member, "FIRST_BACKOFF_S", 0.01)
