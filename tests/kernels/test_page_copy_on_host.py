"""The kernel that copies pages, thread by thread on the host, against torch's indexing."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["page_copy.cu"])


def copy(library: Any, chosen: Tensor, pages: list[int], staged: Tensor, *, gather: bool) -> None:
    """chosen: [N, runs, bytes], a run's bytes dense."""
    listed = torch.tensor(pages, dtype=torch.int32)
    library.call(
        "page_copy",
        *(chosen, staged, c_int64(chosen.stride(0)), c_int64(chosen.stride(1)), chosen.shape[1]),
        *(c_int64(chosen.shape[2]), chosen.shape[0], listed, len(pages), int(gather)),
    )


@pytest.mark.parametrize(
    ("count", "runs", "run_bytes"),
    [
        (3, 4, 48),  # less than a block's threads move
        (2, 2, 2048 * 16 + 16),  # a word more than a block moves
        (900, 1, 16),  # more pages than a launch takes
    ],
)
def test_pages_are_gathered_and_spread_in_the_order_of_the_list(
    count: int, runs: int, run_bytes: int, library: Any
) -> None:
    generator = torch.Generator().manual_seed(count)
    memory = torch.randint(0, 256, (count + 5, runs + 2, 3, run_bytes), generator=generator).byte()
    chosen = memory[:, 1 : 1 + runs, 1]
    order = torch.randperm(count + 5, generator=generator)[:count]
    staged = torch.zeros(count, runs, run_bytes, dtype=torch.uint8)
    copy(library, chosen, order.tolist(), staged, gather=True)
    assert torch.equal(staged, chosen[order])

    expected = memory.clone()
    expected[:, 1 : 1 + runs, 1][order] = staged.flip(0)
    copy(library, chosen, order.tolist(), staged.flip(0).contiguous(), gather=False)
    assert torch.equal(memory, expected), "and nothing else has changed"


@pytest.mark.parametrize("stray", [-1, 4])
def test_a_page_that_does_not_exist_is_refused_before_anything_is_copied(stray: int, library: Any) -> None:
    memory = torch.zeros(6, 1, 32, dtype=torch.uint8)
    staged = torch.ones(3, 1, 32, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="page_copy refused the launch"):
        copy(library, memory[1:5], [0, 1, stray], staged, gather=False)
    assert not memory.any()
