"""Copies between pages and slots by one kernel, against torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_staging import KvStaging
from antiphon.kv_transfer.staging import Block
from antiphon.model.config import preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOT_BYTES, OFFSET = 128 * 2**20, 4096


def make(pages: int, *, full_fp8: bool = False) -> tuple[PagedKvCache, KvStaging]:
    cache = PagedKvCache(
        preset("gpt-oss-20b"),
        full_pages=pages,
        sliding_pages=pages,
        page_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        full_fp8=full_fp8,
    )
    for group in ("full", "sliding"):
        memory = cache.memory(group).view(torch.uint8)
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, device="cuda"))
    return cache, KvStaging(cache, 1, SLOT_BYTES)


def run(copy: Callable[[int, list[Block]], Callable[[], bool]], blocks: list[Block]) -> None:
    """From begin to end, once all that was issued before is done: a copy's stream waits for no other."""
    torch.cuda.synchronize()
    done = copy(OFFSET, blocks)
    torch.cuda.synchronize()
    assert done()


@pytest.mark.parametrize("full_fp8", [False, True])
@pytest.mark.parametrize(
    ("count", "layers", "heads"),
    [
        (1, range(12), range(8)),
        (37, range(3, 6), range(8)),
        (37, range(2, 7), range(4, 6)),
        (950, range(1), range(1)),
    ],
)
def test_what_is_gathered_and_spread_is_what_torch_copies(
    count: int, layers: range, heads: range, full_fp8: bool
) -> None:
    torch.manual_seed(count)
    cache, staging = make(max(count, 40), full_fp8=full_fp8)
    order = torch.randperm(max(count, 40))[:count].tolist()
    blocks = [Block("full", tuple(order), layers, heads), Block("sliding", tuple(order[:3]), layers, heads)]
    memory = staging._memory
    memory.fill_(0xAB)
    run(staging.gather, blocks)
    mine = memory.clone()
    memory.fill_(0xAB)
    staging._copy(OFFSET, blocks, gather=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, mine)

    before = {group: cache.memory(group).clone() for group in ("full", "sliding")}
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, device="cuda"))
    run(staging.scatter, blocks)
    spread = {group: cache.memory(group).clone() for group in before}
    for group, pages in before.items():
        cache.memory(group).copy_(pages)
    staging._copy(OFFSET, blocks, gather=False)
    torch.cuda.synchronize()
    for group, pages in spread.items():
        assert torch.equal(cache.memory(group).view(torch.uint8), pages.view(torch.uint8))


@pytest.mark.parametrize("stray", [-1, 41])
def test_a_page_that_is_not_there_is_refused(stray: int) -> None:
    """There is one page more than asked for, the probe's."""
    cache, staging = make(40)
    before = cache.memory("full").clone()
    staging._memory.fill_(0xAB)
    with pytest.raises(RuntimeError, match="page_copy"):
        staging.scatter(0, [Block("full", (0, stray), range(12), range(8))])
    torch.cuda.synchronize()
    assert torch.equal(cache.memory("full").view(torch.uint8), before.view(torch.uint8))
