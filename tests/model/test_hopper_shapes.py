"""Which shapes the kernels made for Hopper take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.fp8_hopper import FewTokens, HopperFp8DecodeAttention
from antiphon.kernels.attention.prefill_hopper import hopper_prefill_attention
from antiphon.kernels.cuda_library import KernelLibraryError
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.reference import PagedSequences
from antiphon.model.config import preset
from antiphon.model.cuda_roads import hopper_shape_obstacle, require_fp8_pages
from antiphon.protocol.errors import ConfigError


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_published_shapes_are_what_they_are_made_for(model: str) -> None:
    assert hopper_shape_obstacle(preset(model)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 2816),
        ("intermediate_size", 5760),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 16),
        ("head_dim", 128),
        ("experts_per_token", 2),
        ("swiglu_limit", 6.0),
        ("num_experts", 256),
        ("num_experts", 33),
        ("sliding_window", 32),
    ],
)
def test_any_other_shape_is_named(field: str, value: float) -> None:
    obstacle = hopper_shape_obstacle(replace(preset("gpt-oss-20b"), **{field: value}))  # type: ignore[arg-type]
    assert obstacle is not None
    assert obstacle.startswith(f"{field} is {value}, ")


def test_attention_of_chunks_refuses_a_window_shorter_than_a_page() -> None:
    query = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    layer = torch.zeros(1, 1, 2, 64, 64, dtype=torch.bfloat16)
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    sequences = PagedSequences(torch.zeros(1, 1, dtype=torch.int32), starts, lengths, torch.zeros(2).long())
    with pytest.raises(ValueError, match="window of 63"):
        hopper_prefill_attention(query, layer, sequences, torch.zeros(8), 63, 0.125, 2)


def test_fp8_pages_need_a_gpu_that_knows_them_and_kernels_that_were_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANTIPHON_KERNEL_LIBRARY_DIR", str(tmp_path))
    capabilities = {"cuda:0": (8, 0), "cuda:1": (8, 9), "cuda:2": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    with pytest.raises(ConfigError, match=r"fp8_e4m3: cuda:0 is sm_80, e4m3 numbers need sm_89 or later"):
        require_fp8_pages(torch.device("cuda:0"))
    require_fp8_pages(torch.device("cuda:1"))
    with pytest.raises(KernelLibraryError, match="fp8_attention"):
        require_fp8_pages(torch.device("cuda:2"))


def fp8_pages(kv_heads: int, page_size: int) -> Fp8Pages:
    return Fp8Pages(torch.zeros(1, kv_heads, head_bytes(page_size, 64), dtype=torch.uint8), page_size, 64)


def test_decode_over_fp8_pages_refuses_what_it_is_not_made_for() -> None:
    device = torch.device("cpu")
    lengths = torch.ones(2, dtype=torch.int32)
    sequences = PagedSequences(lengths[:, None] - 1, torch.arange(3).int(), lengths, torch.zeros(2).long())
    query, sinks = torch.zeros(2, 16, 64, dtype=torch.bfloat16), torch.zeros(16)
    hopper, portable = HopperFp8DecodeAttention(2, 2, device), Fp8DecodeAttention(2, 16, 2, 64, device)
    for kernel in (hopper, portable):
        with pytest.raises(ValueError, match="expected contiguous"):
            kernel.full(query[:, :8], fp8_pages(2, 64), sequences, sinks, 0.125, query)
        with pytest.raises(ValueError, match="one a query head"):
            kernel.full(query, fp8_pages(2, 64), sequences, sinks[:8], 0.125, query)
    with pytest.raises(ValueError, match=r"pages are \(1, 2, 2, 16, 64\)"):
        hopper.full(query, fp8_pages(2, 16), sequences, sinks, 0.125, query)
    with pytest.raises(ValueError, match=r"query is torch.float32"):
        hopper.full(query.float(), fp8_pages(2, 64), sequences, sinks, 0.125, query)
    with pytest.raises(ValueError, match="groups of <= 16"):
        Fp8DecodeAttention(2, 17, 2, 64, device)
    with pytest.raises(ValueError, match="an even number"):
        FewTokens(1, device)
    with pytest.raises(ValueError, match="17 tokens"):
        FewTokens(2, device).store(fp8_pages(2, 64), torch.zeros(17).long())
