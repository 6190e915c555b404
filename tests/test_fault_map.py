"""Every test that docs/operations/faults.md names is there, so that no rule loses its test in silence."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MAP = TESTS.parent / "docs" / "operations" / "faults.md"


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", MAP.read_text()))
    there: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        there |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))
    assert len(named) > 40
    assert named <= there, sorted(named - there)
