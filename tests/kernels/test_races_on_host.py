"""Accesses that nothing orders, found on the host: those of kernels that lack a barrier, and none of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from antiphon.kernels.moe.streamed import DIM

from . import test_chunk_route_on_host as chunk_route
from . import test_mixed_on_host as mixed
from . import test_skinny_on_host as skinny


@pytest.fixture(scope="module")
def cases(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host(["../tests/kernels/on_host/race_cases.cu"], races=True)


@pytest.mark.parametrize("together", [True, False])
def test_a_warp_that_does_not_come_together(cases: Any, together: bool) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    if together:
        cases.call("exchange", out, 1)
        assert out.tolist() == [lane ^ 1 for lane in range(32)]
    else:
        with pytest.raises(AssertionError, match=r"race_cases.cu:\d+ and earlier .* at race_cases.cu:"):
            cases.call("exchange", out, 0)


@pytest.mark.parametrize(
    ("waits", "together", "found"),
    [
        (1, 1, None),
        (0, 1, r"read by thread \d+ of block 0 at race_cases.cu:\d+ and earlier write by a bulk copy"),
        (1, 0, r"write by a bulk copy of block 0 at race_cases.cu:\d+ and earlier read by thread \d+"),
    ],
)
def test_a_slot_read_too_early_or_given_back_too_early(
    cases: Any, waits: int, together: int, found: str | None
) -> None:
    tiles, out = torch.ones(3, 32, 4, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    if found is None:
        cases.call("add_tiles", tiles, out, len(tiles), waits, together)
        assert out.tolist() == [3] * 32
    else:
        with pytest.raises(AssertionError, match=found):
            cases.call("add_tiles", tiles, out, len(tiles), waits, together)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_count_without_a_fence(cases: Any, fenced: bool) -> None:
    word, counter, out = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    if fenced:
        cases.call("hand_over", word, counter, out, 1)
        assert int(out) == 7
    else:
        with pytest.raises(AssertionError, match=r"read by thread 0 of block 1 .* earlier write by thread 0"):
            cases.call("hand_over", word, counter, out, 0)


def test_projections(compile_for_host: Callable[..., Any]) -> None:
    """Several tiles a block, and more turns of the ring than one."""
    library = compile_for_host(["dense/skinny.cu"], races=True)
    for tokens in (3, 13):
        skinny.test_qkv_rotation_and_page_write(library, tokens)
        skinny.test_output_projection_adds_to_the_residual(library, tokens)
        skinny.test_logits(library, tokens)


def test_router_and_ranks_of_a_chunk(compile_for_host: Callable[..., Any]) -> None:
    library = compile_for_host([f"moe/csrc/{name}.cu" for name in ("chunk_route", "fp8_route")], races=True)
    chunk_route.run(library, *chunk_route.inputs(40, 8), 33, range(4, 8))


@pytest.fixture(scope="module")
def experts(compile_for_host: Callable[..., Any]) -> Any:
    return compile_for_host([f"moe/csrc/{name}" for name in mixed.SOURCES], races=True)


@pytest.fixture(scope="module")
def layer() -> mixed.Layer:
    return mixed.Layer()


@pytest.mark.parametrize(("tile", "tokens"), [(32, 33), (160, 3), (288, 3)])
def test_both_projections_of_a_chunk(experts: Any, layer: mixed.Layer, tile: int, tokens: int) -> None:
    x = torch.randn(tokens, DIM).bfloat16()
    ids = torch.full((tokens, 4), -1)
    ids[:, 1] = 1
    mixed.run(experts, layer, x, ids, torch.full((tokens, 4), 0.25).bfloat16(), tile)
