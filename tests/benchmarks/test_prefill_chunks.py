"""The split of a prompt's time: both ways to issue it are run, compared and reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from antiphon.benchmarks import prefill_chunks
from antiphon.benchmarks.prefill_chunks import LARGEST_ERROR, main, page_errors
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.model.config import preset

ON_A_CPU = ("--models", "tiny", "--device", "cpu", "--chunk", "64", "--repeats", "1")


def test_both_ways_are_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main([*ON_A_CPU, "--prompts", "100", "--out", str(out)]) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert point["ok"]
    assert "chunks up to 64 tokens" in point["road"]
    assert len(point["page_errors"]) == preset("tiny").num_hidden_layers
    for way in ("eager", "graphs"):
        split = point[way]
        assert split["total_ms"] > split["prompt_device_ms"] + split["decode_device_ms"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in printed] == ["eager", "graphs"]


def test_pages_that_differ_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_chunks, "page_errors", lambda *loops: [0.0, 2 * LARGEST_ERROR])
    assert main([*ON_A_CPU, "--prompts", "70"]) == 1


def test_two_pages_in_each_others_place_are_seen() -> None:
    def engine() -> Any:
        cache = PagedKvCache(preset("tiny"), full_pages=3, sliding_pages=3, page_size=16, dtype=torch.float32)
        for group in ("full", "sliding"):
            memory = cache.memory(group)
            memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(1)))
        return cast(Any, SimpleNamespace(kv_cache=cache))

    one, other = engine(), engine()
    assert page_errors(one, other) == [0.0] * preset("tiny").num_hidden_layers
    memory = other.kv_cache.memory("full")
    memory[[0, 1]] = memory[[1, 0]]
    assert max(page_errors(one, other)) > LARGEST_ERROR
