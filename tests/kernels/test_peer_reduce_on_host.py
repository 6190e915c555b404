"""Sums over peer memory, thread by thread on the host: a rank is a thread of this process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.collectives.one_shot import peer_bytes
from antiphon.kernels.collectives.two_shot import two_shot_bytes

EPS, WIDTH, MAX_ROWS = 1e-5, 2880, 5
WAYS = {"one_shot": peer_bytes, "two_shot": two_shot_bytes}
"""What each rank shares for a way to sum."""


@pytest.fixture(scope="module")
def library(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"collectives/{way}.cu" for way in WAYS])


def addresses(memory: Sequence[Tensor], offset: int) -> Any:
    return (ctypes.c_void_p * len(memory))(*(each.data_ptr() + offset for each in memory))


class Ranks:
    """All ranks' memory, and calls of every rank at one time."""

    def __init__(self, library: Any, way: str, ranks: int) -> None:
        self.library, self.way, self.ranks = library, way, ranks
        size = WAYS[way](MAX_ROWS, WIDTH, ranks)
        self.rows_bytes = MAX_ROWS * WIDTH * 2 * 2
        """Words follow what is summed."""
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        self.counts = [torch.zeros(MAX_ROWS, dtype=torch.int32) for _ in range(ranks)]

    def places(self) -> list[Any]:
        matrix = MAX_ROWS * WIDTH * 2
        offsets = [0, self.rows_bytes]
        if self.way == "two_shot":
            offsets = [0, matrix, 2 * matrix, 2 * matrix + MAX_ROWS * self.ranks * 4]
        return [addresses(self.memory, offset) for offset in offsets]

    def call(self, parts: list[Tensor], residuals: list[Tensor], weight: Tensor | None) -> list[Tensor]:
        rows = parts[0].shape[0]
        outs = [torch.full_like(residual, float("nan")) for residual in residuals]

        def work(rank: int) -> None:
            self.library.call(
                f"{self.way}_add_norm",
                *self.places(),
                *(parts[rank], residuals[rank], weight, outs[rank], self.counts[rank], EPS),
                *(rows, WIDTH, MAX_ROWS, rank, self.ranks),
                *((1,) if self.way == "one_shot" else ()),
            )

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_the_same_sum_and_its_norm(way: str, ranks: int, library: Any) -> None:
    """Several launches over the same memory, with more and fewer rows: words only grow, places are reused."""
    everyone = Ranks(library, way, ranks)
    generator = torch.Generator().manual_seed(ranks)
    weight = torch.randn(WIDTH, generator=generator).bfloat16()
    for rows in (1, MAX_ROWS, 3):
        parts = [torch.randn(rows, WIDTH, generator=generator).bfloat16() for _ in range(ranks)]
        before = torch.randn(rows, WIDTH, generator=generator).bfloat16() * 4
        residuals = [before.clone() for _ in range(ranks)]
        outs = everyone.call(parts, residuals, weight)
        total = torch.zeros(rows, WIDTH)
        for part in parts:  # in the order of ranks, rounded once, as a collective and an addition round
            total += part.float()
        expected = (before.float() + total.bfloat16().float()).bfloat16()
        for residual, out in zip(residuals, outs, strict=True):
            assert torch.equal(residual, expected)
            assert torch.equal(out, outs[0])
        norm = reference.rms_norm(expected.float(), weight.float(), EPS)
        assert float((outs[0].float() - norm).norm() / norm.norm()) <= 3e-3


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_without_a_norm_writes_none(way: str, library: Any) -> None:
    everyone = Ranks(library, way, 2)
    residuals = [torch.ones(2, WIDTH).bfloat16() for _ in range(2)]
    outs = everyone.call(
        [torch.full((2, WIDTH), 2.0 + rank).bfloat16() for rank in range(2)], residuals, None
    )
    assert all(torch.equal(residual, torch.full((2, WIDTH), 6.0).bfloat16()) for residual in residuals)
    assert all(bool(out.isnan().all()) for out in outs)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_launches_wrap_around(way: str, library: Any) -> None:
    everyone = Ranks(library, way, 2)
    for memory, counts in zip(everyone.memory, everyone.counts, strict=True):
        memory[everyone.rows_bytes :].view(torch.int32).fill_(-2)
        counts.fill_(-2)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        parts = [torch.randint(-9, 9, (3, WIDTH), generator=generator).bfloat16() for _ in range(2)]
        residuals = [torch.zeros(3, WIDTH).bfloat16() for _ in range(2)]
        everyone.call(parts, residuals, None)
        assert all(torch.equal(residual, parts[0] + parts[1]) for residual in residuals)
    assert everyone.counts[0].tolist() == [2, 2, 2, -2, -2]
