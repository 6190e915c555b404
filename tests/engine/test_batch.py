"""From planned work to tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.configs.workers import KvCacheConfig, WorkerConfig
from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.sequence import PageTable, Sequence
from antiphon.engine.settings import EngineSettings
from antiphon.protocol.errors import ConfigError


def test_tables_slots_and_positions(kit: Any) -> None:
    prefilling = Sequence(kit.request("a", kit.prompt_of(40)), arrival=1, submitted_s=0.0)
    prefilling.pages = PageTable(full=[7, 3, 9], sliding=[4, 6], sliding_first=1)
    decoding = Sequence(kit.request("b", (5,)), arrival=2, submitted_s=0.0)
    decoding.pages = PageTable(full=[2], sliding=[8], sliding_first=0)
    work = [Work(prefilling, 30, 10, samples=True), Work(decoding, 0, 1, samples=True)]
    batch = build_forward_batch(work, 16, torch.device("cpu"))
    assert batch.token_ids.tolist() == [*kit.prompt_of(40)[30:40], 5]
    assert batch.positions.tolist() == [*range(30, 40), 0]
    assert batch.full.query_start.tolist() == [0, 10, 11]
    assert batch.full.kv_len.tolist() == [40, 1]
    assert batch.full.block_table.tolist() == [[7, 3, 9], [2, 0, 0]]
    assert batch.sliding.block_table[0].tolist()[1:] == [4, 6]
    assert batch.full.slot.tolist() == [3 * 16 + 14, 3 * 16 + 15, *range(9 * 16, 9 * 16 + 8), 2 * 16]
    assert batch.sliding.slot.tolist() == [4 * 16 + 14, 4 * 16 + 15, *range(6 * 16, 6 * 16 + 8), 8 * 16]
    assert batch.token_ids.dtype == batch.full.slot.dtype == torch.int64
    assert batch.full.block_table.dtype == batch.full.kv_len.dtype == torch.int32


def test_headroom_pages_are_left_out_of_the_table(kit: Any) -> None:
    sequence = Sequence(kit.request("a", (5,)), arrival=1, submitted_s=0.0)
    sequence.pages = PageTable(full=[2, 9, 4], sliding=[8, 1, 5], sliding_first=0)
    batch = build_forward_batch([Work(sequence, 0, 1, samples=True)], 16, torch.device("cpu"))
    assert batch.full.block_table.tolist() == [[2]]
    assert batch.sliding.block_table.tolist() == [[8]]


def test_settings_name_what_contradicts(kit: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens 24"):
        kit.settings(chunk_tokens=24)
    with pytest.raises(ConfigError, match=r"sliding_pages 4 is too small.* needs 5 pages"):
        kit.settings(sliding_pages=4)


def test_settings_resolve_the_narrower_context(kit: Any) -> None:
    worker = WorkerConfig(
        kv_cache=KvCacheConfig(page_size_tokens=16, full_pages=100, sliding_pages=64), chunk_tokens=32
    )
    assert EngineSettings.resolve(worker, kit.fake_config()).max_sequence_tokens == 1600
    narrowed = EngineSettings.resolve(worker, kit.fake_config(), max_context_tokens=500)
    assert narrowed.max_sequence_tokens == 500
    assert (
        EngineSettings.resolve(worker, kit.fake_config(), max_context_tokens=9999).max_context_tokens == 4096
    )
