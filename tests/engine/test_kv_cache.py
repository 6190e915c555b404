"""The layout that transfers rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels.fp8_pages import Fp8Pages
from antiphon.kernels.reference import write_kv
from antiphon.kv_transfer.plan import Shard, group_layouts
from antiphon.protocol.errors import ConfigError

SMALL: Any = {"full_pages": 50, "sliding_pages": 50, "page_size": 16, "dtype": torch.float32}


def _cache(kit: Any, layers: int = 4) -> PagedKvCache:
    return PagedKvCache(
        kit.fake_config(layers), full_pages=5, sliding_pages=3, page_size=16, dtype=torch.float32
    )


def test_a_page_is_one_run_of_bytes_and_so_are_its_layers(kit: Any) -> None:
    cache = _cache(kit)
    region = {region.group: region for region in cache.memory_regions()}["full"]
    view = cache.layer(3)  # the second full layer
    assert isinstance(view, torch.Tensor)
    assert view.shape == (6, 1, 2, 16, 4)
    layer_bytes = 1 * 2 * 16 * 4 * 4
    start = region.address + 2 * region.page_bytes + 1 * layer_bytes
    assert view[2].data_ptr() == start
    assert view[2].is_contiguous()
    assert region.page_bytes == 2 * layer_bytes
    assert region.pages == 6
    view[2] = 7.0
    page = torch.frombuffer(bytearray(cache.read_page("full", 2)), dtype=torch.float32)
    assert page.tolist() == [0.0] * 128 + [7.0] * 128


def test_full_layers_may_hold_fp8_and_sliding_ones_keep_their_type(kit: Any) -> None:
    cache = PagedKvCache(
        kit.fake_config(4), full_pages=5, sliding_pages=3, page_size=16, dtype=torch.bfloat16, full_fp8=True
    )
    regions = {region.group: region.page_bytes for region in cache.memory_regions()}
    assert regions == {"full": 2 * 2 * 16 * (4 + 2), "sliding": 2 * 2 * 16 * 4 * 2}
    full, sliding = cache.layer(3), cache.layer(0)
    assert isinstance(full, Fp8Pages)
    assert isinstance(sliding, torch.Tensor)
    assert tuple(full.shape) == (6, 1, 2, 16, 4)
    assert full.data[2].data_ptr() == cache.memory("full")[2, 1].data_ptr()
    numbers = torch.tensor([[[1.0, -0.5, 3.5, 0.0]]])  # of the scale 2^-7
    write_kv(numbers, -numbers, full, torch.tensor([2 * 16 + 5]))
    found = cache.numbers(3)
    assert torch.equal(found[2, 0, 0, 5], numbers[0, 0])
    assert torch.equal(found[2, 0, 1, 5], -numbers[0, 0])
    assert int(found.count_nonzero()) == 6
    cache.write_page("full", 4, cache.read_page("full", 2))
    assert torch.equal(cache.numbers(3)[4], found[2])
    print_of = cache.fingerprint("m", "r")
    assert (print_of.kv_dtype, print_of.full_kv_dtype) == ("bfloat16", "fp8_e4m3")
    layouts = group_layouts(print_of)
    assert {group: layouts[group].page_bytes(Shard(1, 0)) for group in regions} == regions
    assert _cache(kit).fingerprint("m", "r").full_kv_dtype == "float32"


def test_fp8_pages_of_odd_sizes_are_refused(kit: Any) -> None:
    with pytest.raises(ConfigError, match="not a multiple of 16"):
        PagedKvCache(kit.fake_config(4), **SMALL | {"page_size": 24}, full_fp8=True)


@pytest.mark.parametrize("full_fp8", [False, True])
def test_random_pages_are_finite_and_of_one_size(kit: Any, full_fp8: bool) -> None:
    cache = PagedKvCache(kit.fake_config(4), **SMALL, full_fp8=full_fp8)
    cache.randomise()
    for layer in range(4):
        numbers = cache.numbers(layer)
        assert bool(numbers.isfinite().all())
        assert 0.7 < float(numbers.std()) < 1.1


def test_groups_do_not_share_memory_and_the_probe_page_is_the_last(kit: Any) -> None:
    cache = _cache(kit)
    assert cache.probe_page("full") == 5
    assert cache.probe_page("sliding") == 3
    first = cache.layer(0)
    assert isinstance(first, torch.Tensor)
    first[:] = 1.0
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


def test_a_layer_group_ends_with_the_later_of_its_two_page_groups(kit: Any) -> None:
    assert _cache(kit, 4).last_layers(2) == (1, 3)
    assert _cache(kit, 5).last_layers(2) == (1, 4)  # sliding layers 0, 2, 4 and full layers 1, 3
    assert _cache(kit, 5).last_layers(1) == (4,)
    with pytest.raises(ConfigError, match=r"layer_groups 3 is not within 1 \.\. 2"):
        _cache(kit, 5).last_layers(3)
