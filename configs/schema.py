"""The one typed configuration tree of a deployment.

Unknown keys are errors, units are in the names, and every key is documented where it is defined: the sections
of workers, routers and operation stand in files of their own, what must hold between them stands here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from antiphon.configs.front_end import RouterConfig
from antiphon.configs.operation import AutoscaleConfig, LogConfig, MetricsConfig, RayConfig, TracingConfig
from antiphon.configs.section import Section
from antiphon.configs.workers import KernelsConfig, TransferConfig, WeightCacheConfig, WorkerConfig


class ModelConfig(Section):
    """Which checkpoint is served and how it is held."""

    path: str
    """Folder of a checkpoint, a hub id such as ``openai/gpt-oss-20b``, or ``gpt-oss-tiny``, which ships with
    the project."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    served_name: str | None = None
    """Name in the HTTP API; the last part of ``path`` when absent."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic and KV type of the plain road; float32 on CPUs."""
    kv_dtype: Literal["same", "fp8_e4m3"] = "same"
    """What the pages of full-attention layers hold: ``same`` is ``dtype``; ``fp8_e4m3`` are e4m3 numbers with
    a bfloat16 scale for each token and kv head, about half of bfloat16's bytes to keep, ship and read, and
    less exact. Sliding layers keep ``dtype``. Needs GPUs from sm_89 on, and pages of a multiple of 16."""
    max_context_tokens: int | None = pydantic.Field(None, ge=2)
    """Prompt + output limit; the checkpoint's own when absent."""

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_name or Path(self.path).name

    @property
    def fp8_kv(self) -> bool:
        """Whether the pages of full layers hold FP8."""
        return self.kv_dtype == "fp8_e4m3"


class DeploymentConfig(Section):
    """A whole deployment: what ``antiphon serve --config FILE`` reads."""

    model: ModelConfig
    router: RouterConfig = RouterConfig()
    prefill: WorkerConfig = WorkerConfig()
    decode: WorkerConfig = WorkerConfig()
    transfer: TransferConfig = TransferConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    ray: RayConfig = RayConfig()
    kernels: KernelsConfig = KernelsConfig()
    weight_cache: WeightCacheConfig = WeightCacheConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

    @pydantic.model_validator(mode="after")
    def _pools_agree(self) -> DeploymentConfig:
        self._check_local_prefill()
        if self.transfer.verify_checksums and (
            self.transfer.staging_slots or self.decode.tensor_parallel > 1
        ):
            raise ValueError(
                f"transfer.verify_checksums with transfer.staging_slots {self.transfer.staging_slots} and "
                f"decode.tensor_parallel {self.decode.tensor_parallel}: only direct writes to one rank can "
                "be checked"
            )
        pools = {"decode": self.decode, **({"prefill": self.prefill} if self.prefill.replicas else {})}
        for role, worker in pools.items():
            if self.transfer.same_host == "required" and worker.device == "cpu":
                raise ValueError(
                    f"transfer.same_host required with {role}.device cpu: only GPUs map pages of their host"
                )
        sizes = (self.prefill.kv_cache.page_size_tokens, self.decode.kv_cache.page_size_tokens)
        if self.prefill.replicas and sizes[0] != sizes[1]:
            raise ValueError(f"kv_cache.page_size_tokens differs: prefill {sizes[0]}, decode {sizes[1]}")
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            page = worker.kv_cache.page_size_tokens
            if self.model.fp8_kv and page % 16:
                raise ValueError(
                    f"model.kv_dtype fp8_e4m3 with {role}.kv_cache.page_size_tokens {page}: "
                    "not a multiple of 16"
                )
            if worker.chunk_tokens % page:
                raise ValueError(
                    f"{role}.chunk_tokens {worker.chunk_tokens} is not a multiple of the page size {page}"
                )
        return self

    @property
    def between_gpus(self) -> bool:
        """Whether KV moves from GPUs to GPUs."""
        return self.prefill.replicas > 0 and self.prefill.device == self.decode.device == "cuda"

    def staging_slots(self, role: Literal["prefill", "decode"]) -> int:
        """Staging slots of each rank of a worker: its own to gather into, or those of all its writers.

        A decode worker has room for one writer more than there are, for a worker that takes another's place.
        """
        asked, required = self.transfer.staging_slots, self.transfer.same_host == "required"
        each = (4 if self.between_gpus and not required else 0) if asked is None else asked
        writers = self.prefill.replicas + 1 if self.prefill.replicas else 0
        return each * (1 if role == "prefill" else writers)

    def _check_local_prefill(self) -> None:
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            most = worker.max_replicas
            if most is not None and (most < worker.replicas or worker.replicas == 0):
                raise ValueError(f"{role}.max_replicas {most} with {role}.replicas {worker.replicas}")
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas 0: a deployment has at least one decode worker")
        if self.prefill.local_prefill != "never":
            raise ValueError("prefill.local_prefill: only decode workers have a choice")
        if (self.prefill.replicas == 0) != (self.decode.local_prefill == "always"):
            raise ValueError(
                f"prefill.replicas {self.prefill.replicas} with decode.local_prefill "
                f"{self.decode.local_prefill}: either prefill workers or decode workers compute long prompts"
            )
