"""The widening of MXFP4 in registers, compiled for the host, against plain torch: value for value."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from antiphon.kernels.moe.mixed import MixedWorkspace, RowExponents, choose_tile, route
from antiphon.kernels.moe.streamed import DIM, pack_matrix
from antiphon.kernels.reference import ExpertMatrix, dequantize_mxfp4

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "moe" / "csrc"


@pytest.fixture(scope="module")
def host_code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    target = tmp_path_factory.mktemp("widen") / "register_widen_on_host.so"
    subprocess.run(
        [
            *("nvcc", "-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-I", str(SOURCES)),
            *("-gencode=arch=compute_90a,code=sm_90a", str(HERE / "register_widen_on_host.cu")),
            *("-o", str(target)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(target))


def random_matrix(experts: int, rows: int, low: int, high: int, seed: int) -> ExpertMatrix:
    generator = torch.Generator().manual_seed(seed)
    return ExpertMatrix(
        torch.randint(0, 256, (experts, rows, 90, 16), dtype=torch.uint8, generator=generator),
        torch.randint(low, high, (experts, rows, 90), dtype=torch.uint8, generator=generator),
    )


def widened(library: ctypes.CDLL, matrix: ExpertMatrix, tops: Tensor, interleaved: bool) -> Tensor:
    """[64, 2880] float32 of one expert's one row tile."""
    packed = pack_matrix(matrix, interleaved)
    values = torch.full((64, DIM), 0x7F, dtype=torch.uint8)
    library.register_widen_on_host(
        *(ctypes.c_void_p(packed.data_ptr()), ctypes.c_void_p(tops.contiguous().data_ptr())),
        *(int(interleaved), ctypes.c_void_p(values.data_ptr())),
    )
    return values.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("low", "high"), [(112, 127), (105, 120), (20, 140), (5, 250)])
def test_registers_hold_the_weights_rounded_once(
    host_code: ctypes.CDLL, low: int, high: int, interleaved: bool
) -> None:
    matrix = random_matrix(1, 64, low, high, seed=low)
    exponents = RowExponents.from_checkpoint(matrix, matrix)
    tops = exponents.down[0]
    got = widened(host_code, matrix, tops, interleaved)
    row_scale = torch.ldexp(torch.ones(64, dtype=torch.float64), tops.int() - 127 - 6)
    exact = dequantize_mxfp4(matrix, torch.float64)[0] / row_scale[:, None]
    assert torch.equal(got.double(), exact.to(torch.float8_e4m3fn).double())
    lossless = torch.equal(got.double(), exact)
    assert lossless == (high - low <= 15)
    assert lossless == (exponents.inexact_blocks == 0)


def test_blocks_of_zeros_may_have_any_scale(host_code: ctypes.CDLL) -> None:
    matrix = random_matrix(1, 64, 110, 120, seed=1)
    matrix.blocks[:, :, ::7] = 0x80  # zero and minus zero
    matrix.scales[:, :, ::7] = 250
    matrix.blocks[:, 5] = 0
    exponents = RowExponents.from_checkpoint(matrix, matrix)
    tops = exponents.down[0]
    assert int(tops.max()) == 119
    assert int(tops[5]) == 0
    got = widened(host_code, matrix, tops, interleaved=False)
    row_scale = torch.ldexp(torch.ones(64, dtype=torch.float64), tops.int() - 127 - 6)
    assert torch.equal(got.double(), dequantize_mxfp4(matrix, torch.float64)[0] / row_scale[:, None])
    assert exponents.inexact_blocks == 0


def test_row_exponents_are_per_expert_and_counted() -> None:
    gate_up, down = random_matrix(2, 6, 100, 110, seed=3), random_matrix(2, 4, 100, 110, seed=4)
    gate_up.scales[1, 2, 8] = 124  # everything else of that row lies 15 or more below
    exponents = RowExponents.from_checkpoint(gate_up, down)
    assert exponents.gate_up.tolist() == gate_up.scales.amax(-1).tolist()
    assert exponents.down.tolist() == down.scales.amax(-1).tolist()
    assert exponents.blocks == 2 * 10 * 90
    assert exponents.inexact_blocks == 89


def test_a_tile_that_no_kernel_is_built_for_is_refused_before_a_launch() -> None:
    ids, unused = torch.zeros(1, 4, dtype=torch.int64), cast(MixedWorkspace, None)
    with pytest.raises(ValueError, match="tiles of 16 tokens"):
        route(ids, unused, 16)


@pytest.mark.parametrize(
    ("tokens", "experts", "tile"),
    [
        (256, 128, 32),
        (1024, 128, 48),
        (1300, 128, 64),
        (2048, 128, 160),
        (1024, 32, 160),
        (8192, 128, 288),
        (8192, 32, 256),
    ],
)
def test_tiles_are_those_that_were_measured_to_be_the_fastest(tokens: int, experts: int, tile: int) -> None:
    assert choose_tile(tokens, experts) == tile
