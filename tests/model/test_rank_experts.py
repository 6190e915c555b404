"""A rank's experts of the published shapes: on which kernels they run, and that padding adds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.moe.expert_range import TOP_K
from antiphon.kernels.moe.mixed import TILES, MixedWorkspace, choose_tile
from antiphon.kernels.moe.streamed import DIM
from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig, preset
from antiphon.model.cuda_experts import CheckpointExperts
from antiphon.model.cuda_roads import hopper_shape_obstacle
from antiphon.model.cuda_weights import collect_parameters, layer_experts
from antiphon.model.parallel import cuda_transformer
from antiphon.model.parallel.cuda_experts import PortableRankExperts
from antiphon.model.parallel.cuda_transformer import takes_hopper_experts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import shard_parameters

MODELS = ("gpt-oss-20b", "gpt-oss-120b")
PADDED = {2: 1536, 4: 768, 8: 384}
"""Columns of a split expert in a rank's memory, of which it holds at most 1,440, 736 or 384."""
ONE_LAYER = GptOssConfig(
    num_hidden_layers=1, num_experts=3, experts_per_token=2, vocab_size=64, hidden_size=64
)
"""Experts of the published width, of a narrow model: kernels are interpreted."""


@pytest.mark.parametrize("ranks", PADDED)
@pytest.mark.parametrize("model", MODELS)
def test_experts_take_the_kernels_made_for_an_h200_dealt_out_whole_and_split(
    model: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_transformer, "hopper_obstacle", lambda config, _: hopper_shape_obstacle(config))
    assert not takes_hopper_experts(ONE_LAYER, ParallelLayout(ranks), torch.device("cuda", 0))
    config, device = preset(model), torch.device("cuda", 0)
    for rank in range(ranks):
        split, whole = (ParallelLayout(ranks, experts, rank) for experts in (False, True))
        assert takes_hopper_experts(config, whole, device)
        assert not takes_hopper_experts(config, whole, torch.device("cpu"))
        assert takes_hopper_experts(config, split, device)
        assert not takes_hopper_experts(config, split, torch.device("cpu"))
        assert whole.shape(config).inner_padded == DIM
        assert len(whole.shape(config).experts) == config.num_experts // ranks
        assert split.shape(config).inner_padded == PADDED[ranks]
        assert len(split.shape(config).inner) <= PADDED[ranks]


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("ranks", PADDED)
def test_parts_of_split_experts_add_up_to_whole_ones(ranks: int) -> None:
    """Zeros that pad a rank's columns add nothing, whether a rank has some or not."""
    parameters = dict(synthesize_parameters(ONE_LAYER, seed=3))

    def layer(held: Iterable[tuple[str, Tensor]]) -> CheckpointExperts:
        device = torch.device("cpu")
        return layer_experts(collect_parameters(held, device, False, torch.float32), 0)

    x = torch.randn(3, ONE_LAYER.hidden_size, generator=torch.Generator().manual_seed(1))
    total = torch.zeros_like(x)
    for rank in range(ranks):
        layout = ParallelLayout(ranks, rank=rank)
        mine = layer(shard_parameters(ONE_LAYER, layout, parameters.items()))
        assert mine.down.scales.shape[2] * MXFP4_BLOCK == PADDED[ranks]
        experts = PortableRankExperts(ONE_LAYER, layout.shape(ONE_LAYER).experts)
        experts.add_layer(mine)
        total += experts.delta(0, x, torch.tensor([3], dtype=torch.int32))
    whole = layer(parameters.items())
    ids, weights = reference.route(x, whole.gate_weight, whole.gate_bias, ONE_LAYER.experts_per_token)
    gate_up, down = (reference.dequantize_mxfp4(matrix) for matrix in (whole.gate_up, whole.down))
    expected = reference.moe(x, ids, weights, gate_up, whole.gate_up_bias, down, whole.down_bias)
    torch.testing.assert_close(total, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("ranks", [1, *PADDED])
@pytest.mark.parametrize("model", MODELS)
def test_a_ranks_tiles_are_those_of_one_gpu_and_have_room(
    model: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert has as many tokens wherever it is; all of a chunk's may want the experts of one rank."""
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    everyone, tokens = preset(model).num_experts, 1024
    held = everyone // ranks
    workspace = MixedWorkspace(tokens, everyone, torch.device("cpu"), held * (ranks - 1), held)
    assert choose_tile(tokens, workspace.all_experts) == choose_tile(tokens, everyone)
    for tile in TILES:
        # All but one expert's last tiles hold one pair.
        most = (tokens * TOP_K - held) // tile + held
        assert most * tile <= workspace.rows.shape[0]
        assert most <= workspace.tiles.shape[0]
