"""From a checkpoint's files to a whole model on one GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.checkpoint.load import read_parameters
from antiphon.model.cuda_roads import ChunkChoices, Road, choose_road, load_libraries
from antiphon.model.cuda_transformer import CudaTransformer
from antiphon.model.weight_cache.load_experts import load_experts
from antiphon.model.weight_cache.store import WeightCache

EXPERT_KINDS = frozenset({TensorKind.EXPERT_MATRIX, TensorKind.EXPERT_SCALE, TensorKind.EXPERT_BIAS})


def load_cuda_model(
    directory: Path,
    device: torch.device | str = "cuda",
    with_unembedding: bool = True,
    resident_fp8: bool = False,
    weight_cache: WeightCache | None = None,
    chunks: ChunkChoices | None = None,
) -> CudaTransformer:
    """Read a checkpoint of either layout into the fast model.

    Args:
        weight_cache: where converted experts are kept; of no use to the portable road, which converts none.
        chunks: see ``CudaTransformer``.

    Raises:
        CheckpointError: see ``open_checkpoint`` and ``read_parameters``.
        KernelLibraryError: the kernels for this model's shape were not built.
        ValueError: the model does not run on the road that ``chunks`` is for.
    """
    index, device = open_checkpoint(directory), torch.device(device)
    skip = frozenset[TensorKind]() if with_unembedding else frozenset({TensorKind.UNEMBEDDING})
    converted = None
    if choose_road(index.config, device) is Road.HOPPER:
        load_libraries()  # what is missing should be said before minutes were spent
        every = range(index.config.num_experts)
        loaded = load_experts(index, every, device, resident_fp8=resident_fp8, cache=weight_cache)
        converted, skip = loaded.layers, skip | EXPERT_KINDS
    return CudaTransformer(
        *(index.config, read_parameters(index, skip, device), device, with_unembedding),
        resident_fp8=resident_fp8,
        converted=converted,
        chunks=chunks,
    )
