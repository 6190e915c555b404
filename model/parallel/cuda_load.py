"""From a checkpoint's files to one rank's GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.cuda_load import EXPERT_KINDS
from antiphon.model.parallel.communicator import Communicator
from antiphon.model.parallel.cuda_transformer import CudaRankTransformer, takes_hopper_experts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.load import read_shard
from antiphon.model.parallel.peer_memory import FusedReduce
from antiphon.model.parallel.reduce_limits import limits_of
from antiphon.model.weight_cache.load_experts import load_experts
from antiphon.model.weight_cache.store import WeightCache


def load_cuda_rank(
    directory: Path,
    layout: ParallelLayout,
    communicator: Communicator,
    store: Store,
    device: torch.device,
    *,
    with_unembedding: bool = True,
    resident_fp8: bool = False,
    peer_memory: bool = True,
    fused: bool = False,
    weight_cache: WeightCache | None = None,
) -> CudaRankTransformer:
    """Read one rank's part of a checkpoint of either layout into the fast model.

    Args:
        store: the ranks' meeting place, where they exchange the handles of their memory.
        with_unembedding: False for workers that never sample.
        peer_memory: False takes every sum over the communicator.
        fused: see ``CudaRankTransformer``.
        weight_cache: where the experts are kept that this rank converts, whole or its columns of each.

    Raises:
        CheckpointError: see ``open_checkpoint`` and ``read_shard``.
        ConfigError: the model cannot be spread this way.
        KernelLibraryError: the kernels for this model's shape were not built.
        RankLostError: another rank did not come, or its memory cannot be reached.
    """
    index = open_checkpoint(directory)
    layout.check(index.config)
    row_reduce = None
    if peer_memory and communicator.size > 1:
        limits = limits_of(communicator.size)
        row_reduce = FusedReduce(store, communicator, limits, index.config.hidden_size, device)
    skip = frozenset[TensorKind]() if with_unembedding else frozenset({TensorKind.UNEMBEDDING})
    converted = None
    if takes_hopper_experts(index.config, layout, device):
        loaded = load_experts(index, layout, device, resident_fp8=resident_fp8, cache=weight_cache)
        converted, skip = loaded.layers, skip | EXPERT_KINDS
    return CudaRankTransformer(
        *(index.config, layout, communicator, read_shard(index, layout, skip, device), device),
        row_reduce=row_reduce,
        with_unembedding=with_unembedding,
        resident_fp8=resident_fp8,
        converted=converted,
        fused=fused,
    )
