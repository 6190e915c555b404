"""Builds a worker inside its process: checkpoint, model, engine, worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.decode_worker.worker import DecodeWorker
from antiphon.engine.events import KvWritten, PagesReserved, PrefillStarted
from antiphon.engine.loop import EngineLoop
from antiphon.engine.settings import EngineSettings
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.model.checkpoint.load import load_model
from antiphon.prefill_worker.worker import PrefillWorker
from antiphon.protocol.identity import Role

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def assemble_worker(
    role: Role,
    worker_id: str,
    config: DeploymentConfig,
    *,
    bind_host: str,
    cluster_token: str,
    transport_factory: TransportFactory | None = None,
) -> PrefillWorker | DecodeWorker:
    """A worker of ``role``, not started yet; its model is loaded when this returns.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the configuration contradicts itself or the checkpoint.
    """
    mine = config.prefill if role is Role.PREFILL else config.decode
    dtype = DTYPES[config.model.dtype]
    torch.set_num_threads(mine.cpu_threads)
    model = load_model(
        Path(config.model.path), dtype, device=mine.device, with_unembedding=role is Role.DECODE
    )
    settings = EngineSettings.resolve(
        mine,
        model.config,
        max_context_tokens=config.model.max_context_tokens,
        layer_groups=config.transfer.layer_groups,
    )

    def make_engine(
        on_scheduled: Callable[[PagesReserved | PrefillStarted], None],
        on_kv_written: Callable[[KvWritten], None],
    ) -> EngineLoop:
        return EngineLoop(
            model,
            settings,
            device=mine.device,
            kv_dtype=dtype,
            on_scheduled=on_scheduled,
            on_kv_written=on_kv_written,
        )

    worker = PrefillWorker if role is Role.PREFILL else DecodeWorker
    return worker(
        worker_id,
        config,
        make_engine,
        bind_host=bind_host,
        cluster_token=cluster_token,
        transport_factory=transport_factory,
    )
