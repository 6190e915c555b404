"""The kernel that copies runs of bytes, thread by thread on the host, against copies of slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["ipc/run_copy.cu"])


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).byte()


def check(library: Any, lengths: list[int], blocks: int) -> None:
    """Runs of these lengths, read in another order than they lie in, with a gap after each on both sides."""
    gap, order = 48, torch.randperm(len(lengths), generator=torch.Generator().manual_seed(blocks)).tolist()
    size = sum(lengths) + gap * len(lengths)
    source, target = random_bytes(size, 1), random_bytes(size, 2)
    places, at = {}, 0
    for index in order:
        places[index] = at
        at += lengths[index] + gap
    rows, expected, to = [], target.clone(), 0
    for index, length in enumerate(lengths):
        rows.append((source.data_ptr() + places[index], target.data_ptr() + to, length))
        expected[to : to + length] = source[places[index] : places[index] + length]
        to += length + gap
    library.call("run_copy", torch.tensor(rows, dtype=torch.int64), len(rows), blocks)
    assert torch.equal(target, expected), "every run, and nothing between them"


@pytest.mark.parametrize("blocks", [1, 3, 32])
@pytest.mark.parametrize(
    "lengths",
    [
        [16],  # fewer words than blocks
        [64 * 1024 + 16],  # one word more than a block has under way
        [393_216, 16, 4096, 32],  # shares that end within a run
        [16 * (1 + index % 9) for index in range(161)],  # more than the small parameter holds
    ],
    ids=["a word", "a run", "uneven runs", "short runs"],
)
def test_runs_arrive_and_their_neighbours_stay(lengths: list[int], blocks: int, library: Any) -> None:
    check(library, lengths, blocks)


def test_more_runs_than_a_launch_takes(library: Any) -> None:
    check(library, [16 * (1 + index % 3) for index in range(2500)], 2)


@pytest.mark.parametrize(
    ("source", "target", "length"), [(8, 0, 16), (0, 4, 16), (0, 0, 24), (0, 0, 0), (0, 0, -16)]
)
def test_a_run_of_no_whole_words_is_refused_before_anything_is_copied(
    source: int, target: int, length: int, library: Any
) -> None:
    from_, to = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    good = (from_.data_ptr(), to.data_ptr(), 16)
    bad = (from_.data_ptr() + source, to.data_ptr() + 32 + target, length)
    rows = torch.tensor([good, bad], dtype=torch.int64)
    with pytest.raises(AssertionError, match="run_copy refused the launch"):
        library.call("run_copy", rows, 2, 4)
    assert not to.any()


@pytest.mark.parametrize(("count", "blocks"), [(0, 4), (1, 0)])
def test_nothing_to_copy_is_refused(count: int, blocks: int, library: Any) -> None:
    to = torch.zeros(16, dtype=torch.uint8)
    rows = torch.tensor([(to.data_ptr(), to.data_ptr(), 16)], dtype=torch.int64)
    with pytest.raises(AssertionError, match="run_copy refused the launch"):
        library.call("run_copy", rows, count, blocks)
