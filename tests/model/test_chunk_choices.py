"""Which steps take FP8 projections, and which ways layers can serve; the products are stood in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels.dense import fp8_projection
from antiphon.kernels.dense.fp8_projection import Fp8Projection
from antiphon.kernels.moe.fp8_weights import Fp8Experts, Fp8Matrix
from antiphon.kernels.moe.mixed import RowExponents
from antiphon.kernels.moe.streamed import StreamedExperts
from antiphon.model import cuda_attention, cuda_experts
from antiphon.model.config import preset
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.cuda_attention import AttentionBlock
from antiphon.model.cuda_experts import HopperExpertLayers
from antiphon.model.cuda_roads import ChunkChoices, Road
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.cuda_weights import LayerWeights, with_fp8_projections

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real ones")
SHORT = 7


class NoBuffers:
    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_long_chunks_take_them_and_short_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    seen: list[int] = []

    def project(x: Tensor, projection: Fp8Projection, workspace: NoBuffers) -> Tensor:
        assert workspace.max_tokens >= x.shape[0]
        seen.append(x.shape[0])
        return (x.float() @ projection.widen().T + projection.bias.float()).bfloat16()

    monkeypatch.setattr(fp8_projection, "project", project)
    monkeypatch.setattr(fp8_projection, "MIN_TOKENS", SHORT + 1)
    monkeypatch.setattr(cuda_attention, "ProjectionWorkspace", NoBuffers)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16()

    plain = LayerWeights(
        attn_norm=random(2880),
        qkv_weight=random(5120, 2880),
        qkv_bias=random(5120),
        sinks=torch.zeros(64),
        out_weight=random(2880, 4096),
        out_bias=random(2880),
        mlp_norm=torch.ones(2880).bfloat16(),
    )
    block = AttentionBlock(preset("gpt-oss-20b"), torch.device("cpu"), Road.PORTABLE)
    rounded = with_fp8_projections(plain)
    block.reserve(2 * SHORT, rounded)
    for tokens in (SHORT, SHORT + 1):
        x, mixed = random(tokens, 2880), random(tokens, 64, 64)
        sums = []
        for weights in (plain, rounded):
            residual = x.clone()
            block.add_output_(residual, mixed, weights)
            sums.append(residual.float() - x.float())
        error = float((sums[1] - sums[0]).norm() / sums[0].norm())
        assert error == 0 if tokens == SHORT else 1e-3 < error <= 4e-2
    assert seen == [SHORT + 1]


def test_another_road_refuses_the_choice() -> None:
    config = preset("tiny")
    with pytest.raises(ValueError, match="no use to the portable road"):
        CudaTransformer(config, [], "cpu", road=Road.PORTABLE, chunks=ChunkChoices(fp8_projections=True))


def test_layers_are_shared_by_ways_that_they_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident tiles may be left aside, not made up."""
    monkeypatch.setattr(cuda_experts, "MoeWorkspace", lambda *_: None)
    byte, bias = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1)
    matrix = Fp8Matrix(byte, torch.ones(1, 1, 4), inexact_tiles=1)
    converted = ConvertedExperts(
        streamed=StreamedExperts(byte, bias, byte, bias),
        exponents=RowExponents(byte, byte, inexact_blocks=5, blocks=7),
        fp8=Fp8Experts(matrix, bias, matrix, bias),
    )
    config, cpu = preset("gpt-oss-20b"), torch.device("cpu")
    resident = HopperExpertLayers(config, cpu, True, ChunkChoices())
    resident.add_converted(bias, bias, converted)
    assert (resident.inexact_blocks, resident.blocks) == (2, 8)
    widened = resident.sharing(False, ChunkChoices(expert_tile=160))
    assert (widened.inexact_blocks, widened.blocks) == (5, 7)
    assert resident.sharing(True, ChunkChoices(expert_tile=128)).blocks == 8
    with pytest.raises(ValueError, match="without FP8 tiles"):
        widened.sharing(True, ChunkChoices())
    with pytest.raises(ValueError, match="tiles of 192 tokens"):
        resident.sharing(True, ChunkChoices(expert_tile=192))
