"""Checkpoints read straight into memory are what they are when mapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from antiphon.model.checkpoint import direct_read
from antiphon.model.checkpoint.direct_read import DirectReader, ShortReadError, opened
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.layout import Layout, TensorKind
from antiphon.model.checkpoint.read import ParameterReader
from antiphon.protocol.errors import CheckpointError

Write = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture(params=list(Layout))
def index(request: pytest.FixtureRequest, write_mini: Write) -> CheckpointIndex:
    return open_checkpoint(write_mini(layout=request.param, max_shard_bytes=40_000))


def test_whole_parameters_rows_and_columns(index: CheckpointIndex) -> None:
    with ParameterReader(index) as mapped, ParameterReader(index, direct=True) as direct:
        for parameter in index.parameters:
            count = parameter.shape[0]
            cuts: list[tuple[slice, ...]] = [(slice(None),), (slice(count // 3, count - 1),)]
            if len(parameter.shape) > 1:
                cuts.append((slice(1, count), slice(0, parameter.shape[1] // 2)))
            for slices in cuts:
                found = direct.read(parameter, slices)
                assert found.is_contiguous() or len(slices) > 1
                assert torch.equal(found, mapped.read(parameter, slices)), (parameter.name, slices)
                assert found.dtype == direct.dtype(parameter)


def test_whole_rows_map_nothing(index: CheckpointIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was mapped")

    monkeypatch.setattr("antiphon.model.checkpoint.read.safe_open", refuse)
    with ParameterReader(index, direct=True) as reader:
        for parameter in index.parameters:
            reader.read(parameter)
        reader.read(index.parameters[0], (slice(1, 3), slice(0, index.parameters[0].shape[1])))


def test_a_file_that_shrinks_and_a_scale_that_is_no_number_are_named(index: CheckpointIndex) -> None:
    scales = next(each for each in index.parameters if each.kind is TensorKind.EXPERT_SCALE)
    stored = index.tensors[scales.parts[0].name]
    with stored.file.open("r+b") as file:
        file.seek(stored.begin + 5)
        file.write(b"\xff")
    with (
        ParameterReader(index, direct=True) as reader,
        pytest.raises(CheckpointError, match=f"{stored.name}: holds a block scale of 255"),
    ):
        reader.read(scales)
    with stored.file.open("r+b") as file:
        file.truncate(stored.end - 1)
    with (
        ParameterReader(index, direct=True) as reader,
        pytest.raises(
            CheckpointError, match=f"{stored.name}: cannot be read: the file ends 1 bytes too early"
        ),
    ):
        reader.read(scales)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_range_is_read_in_pieces(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_read, "PIECE_BYTES", 1000)
    data = torch.randint(0, 256, (10_001,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.numpy().tobytes())
    with DirectReader(CPU, threads) as reader, opened(path) as file:
        into = torch.full((7000,), 7, dtype=torch.uint8)
        pieces = reader.read(file, 3001, into)
        assert len(pieces) == 7
        for piece in pieces:
            piece.result()
        assert torch.equal(into, data[3001:])
        beyond = reader.read(file, 3002, into)
        with pytest.raises(ShortReadError, match="1 bytes too early"):
            beyond[-1].result()
