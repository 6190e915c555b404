"""Which layers are shipped together."""

from __future__ import annotations

import pytest

from antiphon.protocol.layer_groups import layer_range


@pytest.mark.parametrize("layers", [1, 2, 4, 7, 12, 18])
def test_parts_hold_every_layer_once_in_order_and_the_last_of_several_a_single_one(layers: int) -> None:
    for parts in range(1, layers + 1):
        ranges = [layer_range(layers, part, parts) for part in range(parts)]
        assert [layer for part in ranges for layer in part] == list(range(layers))
        assert parts < 3 or len(ranges[-1]) == 1
        others = [len(part) for part in (ranges if parts < 3 else ranges[:-1])]
        assert not others or 1 <= min(others) <= max(others) <= min(others) + 1
