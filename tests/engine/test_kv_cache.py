"""The layout that transfers rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.engine.kv_cache import PagedKvCache, layer_group_bounds
from antiphon.kv_transfer.plan import layer_range
from antiphon.protocol.errors import ConfigError


def _cache(kit: Any, layers: int = 4) -> PagedKvCache:
    return PagedKvCache(
        kit.fake_config(layers), full_pages=5, sliding_pages=3, page_size=16, dtype=torch.float32
    )


def test_a_page_is_one_run_of_bytes_and_so_are_its_layers(kit: Any) -> None:
    cache = _cache(kit)
    region = {region.group: region for region in cache.memory_regions()}["full"]
    view = cache.layer(3)  # the second full layer
    assert view.shape == (6, 1, 2, 16, 4)
    start = region.address + 2 * region.page_bytes + 1 * cache.layer_bytes()
    assert view[2].data_ptr() == start
    assert view[2].is_contiguous()
    assert region.page_bytes == 2 * cache.layer_bytes() == 2 * (1 * 2 * 16 * 4 * 4)
    assert region.pages == 6
    view[2] = 7.0
    page = torch.frombuffer(bytearray(cache.read_page("full", 2)), dtype=torch.float32)
    assert page.tolist() == [0.0] * 128 + [7.0] * 128


def test_groups_do_not_share_memory_and_the_probe_page_is_the_last(kit: Any) -> None:
    cache = _cache(kit)
    assert cache.probe_page("full") == 5
    assert cache.probe_page("sliding") == 3
    cache.layer(0)[:] = 1.0
    assert cache.memory("full").count_nonzero() == 0
    assert cache.memory("sliding")[:, 0].eq(1).all()
    assert cache.memory("sliding")[:, 1].eq(0).all()


def test_the_fingerprint_says_what_peers_must_share(kit: Any) -> None:
    ours = _cache(kit).fingerprint("m", "r")
    assert (ours.kv_dtype, ours.page_size_tokens, ours.full_layers, ours.window_tokens) == (
        "float32",
        16,
        2,
        24,
    )
    assert ours.differences(_cache(kit).fingerprint("m", "r")) == []
    assert len(ours.differences(_cache(kit, layers=6).fingerprint("m", "r"))) == 2


@pytest.mark.parametrize(("layers", "groups"), [(12, 5), (18, 4), (2, 2), (7, 3)])
def test_layer_groups_partition_the_layers_in_order(layers: int, groups: int) -> None:
    bounds = layer_group_bounds(layers, groups)
    assert [layer for begin, end in bounds for layer in range(begin, end)] == list(range(layers))
    assert all(end > begin for begin, end in bounds)
    assert [range(*pair) for pair in bounds] == [layer_range(layers, g, groups) for g in range(groups)]


def test_a_layer_group_ends_with_the_later_of_its_two_page_groups(kit: Any) -> None:
    assert _cache(kit, 4).last_layers(2) == (1, 3)
    assert _cache(kit, 5).last_layers(2) == (1, 4)  # sliding layers 0, 2, 4 and full layers 1, 3
    with pytest.raises(ConfigError, match=r"layer_groups 3 is not within 1 \.\. 2"):
        _cache(kit, 5).last_layers(3)
