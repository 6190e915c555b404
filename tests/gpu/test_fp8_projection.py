"""The FP8 projections of a chunk on the GPU against products of the rounded operands and the exact ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from repeated import alone_and_beside_copies, check_launches
from torch import Tensor

from antiphon.benchmarks.timing import relative_error
from antiphon.kernels.dense.fp8_projection import (
    MIN_TOKENS,
    TILES,
    Fp8Projection,
    ProjectionWorkspace,
    project,
)
from antiphon.kernels.reference import PagedSequences
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import preset
from antiphon.model.cuda_roads import ChunkChoices
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.forward import ForwardBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(5120, 2880), (2880, 4096)]
BOUND = 4e-2
"""Relative L2 of products whose operands are both rounded to e4m3."""
PAGE = 64


def quantised(x: Tensor) -> Tensor:
    """What e4m3 with one scale for 128 columns of a token keeps."""
    parts = []
    for part in x.float().split(128, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_only_the_operands_are_rounded(rows: int, columns: int, tile: int) -> None:
    torch.manual_seed(columns)
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = torch.randn(rows, columns, device="cuda") / columns**0.5
    bias = torch.randn(rows, device="cuda").bfloat16()
    projection = Fp8Projection.from_weight(weight, bias)
    workspace = ProjectionWorkspace(2500, torch.device("cuda"))
    for tokens in (1, 63, 64, 65, 127, 128, 129, 257, 1000, 1024, 2500):
        x = torch.randn(tokens, columns, device="cuda").bfloat16() * 3
        workspace.activations.fill_(0x7F)  # NaN
        guarded = torch.full((tokens + 1, rows), float("nan"), device="cuda").bfloat16()
        out = project(x, projection, workspace, guarded[:tokens], tile)
        assert guarded[tokens].isnan().all()
        assert relative_error(out, quantised(x) @ projection.widen().T + bias.float()) <= 3e-3
        assert relative_error(out, x.float() @ weight.T + bias.float()) <= BOUND
        assert torch.equal(out, project(x, projection, workspace, tile=tile))


@alone_and_beside_copies
@pytest.mark.parametrize("tokens", [65, 1024, 2500])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_launch_is_the_same(rows: int, columns: int, tile: int, tokens: int, beside: bool) -> None:
    torch.manual_seed(tokens)
    weight = torch.randn(rows, columns, device="cuda") / columns**0.5
    projection = Fp8Projection.from_weight(weight, torch.randn(rows, device="cuda").bfloat16())
    workspace = ProjectionWorkspace(tokens, torch.device("cuda"))
    x = torch.randn(2, tokens, columns, device="cuda").bfloat16()

    def launch(turn: int, out: Tensor) -> None:
        project(x[turn], projection, workspace, out, tile)

    check_launches(launch, torch.full((tokens, rows), float("nan"), device="cuda").bfloat16(), beside=beside)


def test_a_token_of_nan_is_its_own_matter() -> None:
    projection = Fp8Projection.from_weight(
        torch.randn(5120, 2880, device="cuda"), torch.zeros(5120, device="cuda")
    )
    x = torch.randn(300, 2880, device="cuda").bfloat16()
    x[7, 5] = float("nan")
    out = project(x, projection, ProjectionWorkspace(300, torch.device("cuda")))
    assert out[7].isnan().all()
    assert not out[:7].isnan().any()
    assert not out[8:].isnan().any()


class Cache:
    """Pages of a few layers in order, poisoned."""

    def __init__(self, layers: int, pages: int) -> None:
        self.layers = [
            torch.full((pages, 8, 2, PAGE, 64), 50.0, dtype=torch.bfloat16, device="cuda")
            for _ in range(layers)
        ]

    def layer(self, index: int) -> Tensor:
        return self.layers[index]


def test_a_model_with_them_fills_pages_that_differ_by_their_rounding() -> None:
    """First layer: those of bf16 within the bound; what follows is amplified by the model."""
    tokens = MIN_TOKENS + 37
    config = replace(preset("gpt-oss-20b"), num_hidden_layers=2)
    pages = -(-tokens // PAGE)
    positions = torch.arange(tokens, device="cuda")
    sequences = PagedSequences(
        torch.arange(pages, dtype=torch.int32, device="cuda")[None],
        torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        positions.clone(),
    )
    ids = torch.randint(0, 199_998, (tokens,), generator=torch.Generator().manual_seed(4)).cuda()
    caches = []
    for fp8 in (False, True):
        model = CudaTransformer(
            config, synthesize_parameters(config, 0, "cuda"), chunks=ChunkChoices(fp8_projections=fp8)
        )
        cache = Cache(2, pages)
        hidden = model.forward(ForwardBatch(ids, positions, sequences, sequences), cache)
        assert bool(hidden.isfinite().all())
        caches.append(cache)
    written = [cache.layer(0).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens] for cache in caches]
    error = relative_error(written[1], written[0].float())
    print(f"keys and values of the first layer: {error:.1e}")
    assert 1e-3 < error <= BOUND
