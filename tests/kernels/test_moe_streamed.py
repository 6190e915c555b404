"""The streamed MXFP4 layout: nothing lost, and every lane's bytes are the operand they stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from antiphon.kernels.cuda_library import KernelLibraryError
from antiphon.kernels.moe import build
from antiphon.kernels.moe.decode import LaunchPlan, plan_launch
from antiphon.kernels.moe.regime import streams_4_bit
from antiphon.kernels.moe.streamed import (
    DIM,
    SPLIT_COLUMNS,
    STAGE_WEIGHT_BYTES,
    StreamedExperts,
    pack_matrix,
    unpack_matrix,
)
from antiphon.kernels.reference import MXFP4_BLOCK, ExpertMatrix, dequantize_mxfp4


def random_matrix(rows: int, experts: int = 2, blocks: int = 90) -> ExpertMatrix:
    return ExpertMatrix(
        torch.randint(0, 256, (experts, rows, blocks, 16), dtype=torch.uint8),
        torch.randint(0, 255, (experts, rows, blocks), dtype=torch.uint8),
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("rows", "blocks"), [(64, 90), (192, 90), (64, 48), (128, 24), (64, 12)])
def test_packing_loses_nothing(rows: int, blocks: int, interleaved: bool) -> None:
    matrix = random_matrix(rows, blocks=blocks)
    back = unpack_matrix(pack_matrix(matrix, interleaved), interleaved)
    assert torch.equal(back.blocks, matrix.blocks)
    assert torch.equal(back.scales, matrix.scales)


def expand(packed: int) -> tuple[int, int]:
    """What the kernel does to a packed byte: the two e4m3 codes."""
    return packed & 0x9C, ((packed << 2) & 0x8C) | ((packed >> 2) & 0x10)


def e4m3(code: int) -> float:
    return float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("interleaved", [True, False])
def test_lanes_hold_the_wgmma_operand(interleaved: bool) -> None:
    """Registers 0..3 of lane (g, t): rows g, g + 8, g, g + 8; columns 4t.. of the first and second half."""
    matrix = random_matrix(128, experts=1)
    matrix.scales.fill_(127)
    weights = dequantize_mxfp4(matrix)[0]
    packed = pack_matrix(matrix, interleaved)[0]
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        tile, stage, block, warp, lane, register, j = (
            int(torch.randint(0, limit, (1,), generator=generator)) for limit in (2, 15, 6, 4, 32, 4, 4)
        )
        g, t = lane // 4, lane % 4
        load = packed[tile, stage, ((block // 2 * 4 + warp) * 32 + lane) * 16 :][:16]
        word = load[(block % 2) * 8 + (register // 2) * 4 :][:4]
        value = e4m3(expand(int(word[j]))[register % 2]) * 64
        place = g + 8 * (register % 2)  # row of the operand
        row = tile * 64 + warp * 16 + ((place % 8) * 2 + place // 8 if interleaved else place)
        column = (stage * 6 + block) * 32 + (register // 2) * 16 + t * 4 + j
        assert value == float(weights[row, column])


@pytest.mark.parametrize("interleaved", [True, False])
def test_scale_words_hold_both_rows_of_two_blocks(interleaved: bool) -> None:
    matrix = random_matrix(64, experts=1)
    packed = pack_matrix(matrix, interleaved)[0, 0]
    for stage, warp, g, block in ((0, 0, 0, 0), (3, 2, 5, 1), (14, 3, 7, 5), (7, 1, 6, 4)):
        scales = packed[stage, STAGE_WEIGHT_BYTES + (warp * 8 + g) * 12 :][:12]
        word = int(scales[block // 2 * 4 : block // 2 * 4 + 4].view(torch.int32)) & 0xFFFFFFFF
        upper = ((word << 7 if block % 2 else word << 23) & 0x7F800000) >> 23
        lower = ((word >> 1 if block % 2 else word << 15) & 0x7F800000) >> 23
        rows = (2 * g, 2 * g + 1) if interleaved else (g, g + 8)
        assert (upper, lower) == tuple(
            int(matrix.scales[0, warp * 16 + row, stage * 6 + block]) for row in rows
        )


def test_a_bf16_value_is_the_sum_of_two_e4m3_values() -> None:
    """The kernel's claim: exact down to 2^-9 of the largest magnitude, off by 2^-17 of it at most below."""
    x = (torch.randn(4000) * torch.logspace(-6, 2, 4000)).bfloat16().float()
    peak = x.abs().max()
    factor = 2.0 ** (7 - torch.floor(torch.log2(peak)))
    scaled = x * factor
    high = scaled.to(torch.float8_e4m3fn).float()
    low = (scaled - high).to(torch.float8_e4m3fn).float()
    error = (high + low - scaled).abs() / factor
    assert float(error[x.abs() >= peak * 2.0**-9].max()) == 0.0
    assert float(error.max()) <= float(peak) * 2.0**-17


def test_columns_of_experts_are_known_by_their_number() -> None:
    def converted(columns: int, rows: int) -> StreamedExperts:
        gate_up, down = random_matrix(rows, 1), random_matrix(DIM, 1, columns // MXFP4_BLOCK)
        return StreamedExperts.from_checkpoint(gate_up, torch.zeros(1, rows), down, torch.zeros(1, DIM))

    for columns in (DIM, *SPLIT_COLUMNS):
        experts = converted(columns, 2 * columns)
        assert (experts.columns, experts.split) == (columns, columns != DIM)
        assert experts.gate_up.shape == (1, columns // 32, 15, 6528)
        assert experts.down.shape == (1, 45, columns // 192, 6528)
    with pytest.raises(ValueError, match="down: 1440 columns; the kernels take 2880, or"):
        converted(1440, 2880)
    with pytest.raises(ValueError, match=r"gate_up: blocks \(1, 768, 90, 16\)"):
        converted(768, 768)


def test_wrong_shapes_and_nan_scales_are_refused() -> None:
    matrix = random_matrix(64, experts=1)
    bias = torch.zeros(1, 64)
    with pytest.raises(ValueError, match="gate_up: blocks"):
        StreamedExperts.from_checkpoint(matrix, bias, matrix, bias)
    matrix.scales[0, 5, 7] = 255
    with pytest.raises(ValueError, match="NaN"):
        pack_matrix(matrix, interleaved=False)


def test_plans() -> None:
    assert plan_launch(1, 32) == LaunchPlan(token_tile=4)
    tiles = {tokens: plan_launch(tokens, 32).token_tile for tokens in (4, 8, 16, 32, 64, 128, 512)}
    assert tiles == {4: 4, 8: 4, 16: 4, 32: 8, 64: 16, 128: 24, 512: 24}
    assert plan_launch(64, 128).token_tile == 4
    assert plan_launch(128, 128).token_tile == 8
    with pytest.raises(ValueError, match="token_tile"):
        LaunchPlan(token_tile=12)


def test_a_library_that_was_not_built_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_KERNEL_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(KernelLibraryError, match="antiphon kernels build"):
        build.LIBRARY.load()


@pytest.mark.timeout(900)  # two minutes of two cores, of which a crowded machine may give little
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_sources_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_KERNEL_LIBRARY_DIR", str(tmp_path))
    for library, signatures in (
        (build.LIBRARY, build._SIGNATURES),
        (build.SPLIT_LIBRARY, build._SPLIT_SIGNATURES),
    ):
        path = library.build()
        assert path.parent == tmp_path
        code = path.read_bytes()
        assert all(name.encode() in code for name in signatures)


def test_long_steps_leave_the_4_bit_road() -> None:
    for experts, widened_alone, most in (
        (32, True, 80),
        (128, True, 128),
        (32, False, 256),
        (128, False, 256),
    ):
        assert streams_4_bit(1, experts, widened_alone)
        assert streams_4_bit(most, experts, widened_alone)
        assert not streams_4_bit(most + 1, experts, widened_alone)
