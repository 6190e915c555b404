"""The range of experts that a rank holds, as every workspace of the experts' kernels checks it."""

from __future__ import annotations

import pytest

from antiphon.kernels.moe.expert_range import MAX_EXPERTS, held_experts


def test_all_that_follow_or_so_many() -> None:
    assert held_experts(MAX_EXPERTS) == MAX_EXPERTS
    assert held_experts(32, 24) == 8
    assert held_experts(32, 8, 8) == 8


@pytest.mark.parametrize(
    ("all_experts", "first", "experts", "message"),
    [
        (0, 0, None, "0 experts"),
        (MAX_EXPERTS + 1, 0, None, "129 experts"),
        (32, -1, 4, r"experts -1 \+ 4 are not within 32"),
        (32, 32, None, r"experts 32 \+ 0 are not"),
        (32, 28, 8, r"experts 28 \+ 8 are not"),
    ],
)
def test_a_range_beyond_the_model_is_refused(
    all_experts: int, first: int, experts: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        held_experts(all_experts, first, experts)
