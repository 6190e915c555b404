"""Builds a worker inside its process: checkpoint, model, engine, worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.cluster.grammar_vocabulary import harmony_grammars
from antiphon.cluster.rank_assembly import (
    DTYPES,
    LeaderFollowers,
    lead,
    require_built_kernels,
    reserve_for_prompts,
    weight_cache,
    worker_config,
)
from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import WorkerConfig
from antiphon.decode_worker.worker import DecodeWorker
from antiphon.engine.events import KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.loop import EngineLoop
from antiphon.engine.settings import EngineSettings
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.model.checkpoint.load import load_model
from antiphon.model.forward import LanguageModel
from antiphon.prefill_worker.worker import PrefillWorker
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role
from antiphon.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)


def assemble_worker(
    role: Role,
    worker_id: str,
    config: DeploymentConfig,
    *,
    bind_host: str,
    cluster_token: str,
    ranks: Store | None = None,
    transport_factory: TransportFactory | None = None,
    tracer: Tracer | None = None,
) -> PrefillWorker | DecodeWorker:
    """A worker of ``role``, not started yet; its model is loaded when this returns.

    Args:
        ranks: where the other ranks meet this one, for a worker of several.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the configuration contradicts itself or the checkpoint.
        RankLostError: another rank died or did not come.
    """
    mine = worker_config(role, config)
    dtype = DTYPES[config.model.dtype]
    torch.set_num_threads(mine.cpu_threads)
    model: LanguageModel
    followers = kv_heads = None
    if ranks is not None:
        model = leader = lead(role, config, ranks)
        followers = LeaderFollowers(leader, config.transfer.layer_groups)
        kv_heads = leader.config.num_key_value_heads // leader.size
    else:
        model = _load(role, config, mine)
    settings = EngineSettings.resolve(
        mine,
        model.config,
        max_context_tokens=config.model.max_context_tokens,
        layer_groups=config.transfer.layer_groups,
        decode_graphs=mine.device == "cuda" and role is Role.DECODE,
        chunk_graphs=role is Role.PREFILL or mine.local_prefill != "never",
    )

    grammars = harmony_grammars(model.config.vocab_size) if role is Role.DECODE else None

    def make_engine(
        on_scheduled: Callable[[PagesReserved | PrefillStarted], None],
        on_kv_written: Callable[[KvWritten], None],
    ) -> EngineLoop:
        engine = EngineLoop(
            model,
            settings,
            device=mine.device,
            kv_dtype=dtype,
            kv_heads=kv_heads,
            full_fp8=config.model.fp8_kv,
            on_scheduled=on_scheduled,
            on_kv_written=on_kv_written,
            grammars=grammars,
        )
        reserve_for_prompts(role, mine, model, engine.kv_cache)
        return engine

    worker = PrefillWorker if role is Role.PREFILL else DecodeWorker
    return worker(
        worker_id,
        config,
        make_engine,
        bind_host=bind_host,
        cluster_token=cluster_token,
        followers=followers,
        transport_factory=transport_factory,
        tracer=tracer,
    )


def _load(role: Role, config: DeploymentConfig, mine: WorkerConfig) -> LanguageModel:
    """The plain model on a CPU, the fast one on a GPU."""
    path, samples = Path(config.model.path), role is Role.DECODE
    if mine.device == "cpu":
        return load_model(path, DTYPES[config.model.dtype], with_unembedding=samples)
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype {config.model.dtype}: a GPU computes in bfloat16")
    from antiphon.model.cuda_load import load_cuda_model  # loads Triton
    from antiphon.model.cuda_roads import ChunkChoices, require_fp8_pages

    if config.model.fp8_kv:
        require_fp8_pages(torch.device("cuda"))
    if config.kernels.require_built:
        require_built_kernels(path, mine, "cuda", fp8_kv=config.model.fp8_kv)
    model = load_cuda_model(
        path,
        with_unembedding=samples,
        resident_fp8=mine.fp8_experts == "resident",
        weight_cache=weight_cache(config),
        chunks=ChunkChoices(fp8_projections=True) if mine.fp8_projections else None,
    )
    _log.info("%s worker runs on the %s road", role, model.road)
    inexact, blocks = model.inexact_blocks
    if inexact:
        _log.warning("%d of %d blocks of expert weights may lose bits in long chunks", inexact, blocks)
    return model
