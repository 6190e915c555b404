"""Which launch routes a chunk, by its padded size, and whether another one ranks; all are stood in for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.moe import mixed, prefill
from antiphon.kernels.moe.chunk_route import FASTER_TOKENS
from antiphon.kernels.moe.fp8_weights import Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.mixed import RowExponents
from antiphon.kernels.moe.streamed import StreamedExperts
from antiphon.model import chunk_router, cuda_experts
from antiphon.model.config import preset
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_experts import HopperExpertLayers
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.parallel import cuda_experts as rank_experts
from antiphon.model.parallel.cuda_experts import HopperRankExperts
from antiphon.model.parallel.layout import ParallelLayout

CONFIG, CPU = preset("gpt-oss-20b"), torch.device("cpu")
LIVE = torch.ones(1, dtype=torch.int32)
SIZES = (FASTER_TOKENS - 1, FASTER_TOKENS, FASTER_TOKENS + 1, 8 * FASTER_TOKENS)
AT_ONCE, APART = ["router and rank", "experts"], ["router", "rank", "experts"]


class Buffers:
    """No memory at all."""

    tile = 64

    def __init__(self, max_tokens: int, *_: object, **__: object) -> None:
        self.max_tokens = max_tokens


class Launches:
    """What a step would have launched; those of two models in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[str] = []
        self.overlapped: set[bool] = set()

        def stand_in(module: ModuleType, name: str) -> None:
            real = inspect.signature(getattr(module, name))
            monkeypatch.setattr(module, name, self._standing_in(name, real))

        stand_in(chunk_router, "route")
        stand_in(chunk_router, "route_ranked")
        for module in (mixed, prefill):
            stand_in(module, "moe_add_rms_norm_")
        for name in ("moe_mixed", "moe_fp8"):
            stand_in(rank_experts, name)
        for module in (cuda_experts, rank_experts):
            for name in ("MoeWorkspace", "MixedWorkspace", "Fp8Workspace"):
                monkeypatch.setattr(module, name, Buffers)
        monkeypatch.setattr(rank_experts.moe_build, "LIBRARY", SimpleNamespace(load=lambda: None))

    def _standing_in(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        def launch(*positional: object, **named: object) -> object:
            given = signature.bind(*positional, **named).arguments
            self.overlapped.add(bool(given.get("overlap", False)))
            if name.startswith("route"):
                self._made.append("router and rank" if name == "route_ranked" else "router")
                assert given["live"] is LIVE
                return LIVE, LIVE
            self._made += ["experts"] if given.get("ranked", False) else ["rank", "experts"]
            return LIVE

        return launch

    def take(self) -> list[str]:
        """Those since the last call."""
        made, self._made = self._made, []
        return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def converted(resident: bool) -> ConvertedExperts:
    byte, bias = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1)
    matrix = Fp8Matrix(byte, torch.ones(1, 1, 4), inexact_tiles=0)
    return ConvertedExperts(
        streamed=StreamedExperts(byte, bias, byte, bias),
        exponents=RowExponents(byte, byte, inexact_blocks=0, blocks=1),
        fp8=Fp8Experts(matrix, bias, matrix, bias) if resident else None,
    )


def tokens(count: int) -> Tensor:
    return torch.zeros(count, 1)


@pytest.mark.parametrize("resident", [False, True], ids=["widened", "resident"])
def test_short_chunks_are_routed_and_ranked_in_one_launch(launches: Launches, resident: bool) -> None:
    layers = HopperExpertLayers(CONFIG, CPU, resident, ChunkChoices())
    layers.add_converted(LIVE, LIVE, converted(resident))
    for size in SIZES:
        layers.forward(0, tokens(size), tokens(size), LIVE, LIVE, LIVE)
        assert launches.take() == (AT_ONCE if size <= FASTER_TOKENS else APART), size
    assert launches.overlapped == {False}


@pytest.mark.parametrize("resident", [False, True], ids=["widened", "resident"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
def test_a_ranks_short_chunks_are_where_its_launches_are_fused(
    launches: Launches, fused: bool, resident: bool
) -> None:
    shape = ParallelLayout(2, True, 1).shape(CONFIG)
    experts = HopperRankExperts(CONFIG, shape, CPU, resident, fused)
    experts.add_converted(LIVE, LIVE, converted(resident))
    for size in SIZES:
        experts.delta(0, tokens(size), LIVE)
        assert launches.take() == (AT_ONCE if fused and size <= FASTER_TOKENS else APART), size
    assert (True in launches.overlapped) is fused
