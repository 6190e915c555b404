"""From a checkpoint's files to one rank's memory; a rank reads only what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.checkpoint.load import fill
from antiphon.model.checkpoint.read import ParameterReader
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import ParameterCuts, assemble
from antiphon.model.parallel.transformer import ParallelTransformer


def load_parallel_model(
    directory: Path,
    layout: ParallelLayout,
    communicator: Communicator,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    with_unembedding: bool = True,
) -> ParallelTransformer:
    """Read one rank's part of a checkpoint of either layout into a plain-torch model.

    Args:
        directory: folder with config.json and safetensors files, which every rank can read.
        layout: how the model is spread, and which rank this is.
        communicator: of the ranks; nothing is said over it while loading.
        dtype: float32 or bfloat16; MXFP4 experts are dequantised to it once, here (exact in both).
        device: where this rank's part lives.
        with_unembedding: False for workers that never sample.

    Raises:
        CheckpointError: see ``open_checkpoint`` and ``read_shard``.
        ConfigError: the model cannot be spread this way.
    """
    index = open_checkpoint(directory)
    model = ParallelTransformer(index.config, layout, communicator, dtype, device, with_unembedding)
    skip = frozenset[TensorKind]() if with_unembedding else frozenset({TensorKind.UNEMBEDDING})
    fill(model, read_shard(index, layout, skip))
    return model


def read_shard(
    index: CheckpointIndex,
    layout: ParallelLayout,
    skip: frozenset[TensorKind] = frozenset(),
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """One rank's part of every parameter, in the order of the model, on a device, in the dtype of the files.

    Yields:
        (OpenAI's name, tensor), as ``read_parameters`` does.

    Raises:
        CheckpointError: a file that cannot be read, or an expert scale that is not a number.
        ConfigError: the model cannot be spread this way.
    """
    cuts = ParameterCuts(index.config, layout)
    with ParameterReader(index, device) as reader:
        for parameter in index.parameters:
            if parameter.kind in skip:
                continue
            cut = cuts.of(parameter.name, parameter.shape)
            read = partial(reader.read, parameter)
            yield parameter.name, assemble(cut, parameter.shape, reader.dtype(parameter), read)
