"""The widening kernel's code, compiled for the host, against the conversion in plain torch: byte for byte."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.kernels.moe.fp8_weights import Fp8Matrix, convert_matrix
from antiphon.kernels.moe.streamed import pack_matrix
from antiphon.kernels.reference import ExpertMatrix

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "moe" / "csrc"

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def host_code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("widen") / "widen_on_host.so"
    subprocess.run(
        [
            *("nvcc", "-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-I", str(SOURCES)),
            *("-gencode=arch=compute_90a,code=sm_90a", str(HERE / "widen_on_host.cu"), "-o", str(target)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(target))


def widen(library: ctypes.CDLL, matrix: ExpertMatrix, interleaved: bool) -> Fp8Matrix:
    packed = pack_matrix(matrix, interleaved)
    row_tiles = packed.shape[1]
    tiles = -(-row_tiles // 2)
    values = torch.full((1, tiles, 23, 16384), 0x7F, dtype=torch.uint8)
    scales = torch.full((1, tiles, 23), float("nan"))

    def pointer(tensor: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    inexact = library.widen_on_host(
        pointer(packed), row_tiles, int(interleaved), pointer(values), pointer(scales)
    )
    return Fp8Matrix(values, scales, inexact)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("rows", "low", "high"), [(128, 105, 120), (192, 110, 111), (320, 90, 130)])
def test_widening_equals_the_plain_conversion(
    host_code: ctypes.CDLL, rows: int, low: int, high: int, interleaved: bool
) -> None:
    matrix = ExpertMatrix(
        torch.randint(0, 256, (1, rows, 90, 16), dtype=torch.uint8),
        torch.randint(low, high, (1, rows, 90), dtype=torch.uint8),
    )
    expected = convert_matrix(matrix)
    found = widen(host_code, matrix, interleaved)
    assert torch.equal(found.scales, expected.scales)
    values, plain = (m.values.view(torch.float8_e4m3fn).float() for m in (found, expected))
    assert torch.equal(values, plain)
    assert found.inexact_tiles == expected.inexact_tiles
    assert (found.inexact_tiles > 0) == (high - low > 15)


@pytest.mark.parametrize("interleaved", [True, False])
def test_blocks_of_zeros_set_no_exponent(host_code: ctypes.CDLL, interleaved: bool) -> None:
    matrix = ExpertMatrix(
        torch.randint(0, 256, (1, 128, 90, 16), dtype=torch.uint8),
        torch.randint(100, 103, (1, 128, 90), dtype=torch.uint8),
    )
    matrix.blocks[0, 9, 4] = 0x80
    matrix.scales[0, 9, 4] = 250
    expected, found = convert_matrix(matrix), widen(host_code, matrix, interleaved)
    assert torch.equal(found.scales, expected.scales)
    assert found.inexact_tiles == 0
    values, plain = (m.values.view(torch.float8_e4m3fn).float() for m in (found, expected))
    assert torch.equal(values, plain)
