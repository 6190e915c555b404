"""What stands against what on the same GPUs: prefill and decode split, or as many colocated engines."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.benchmarks.peers.replicas import PeerReplicas
from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import WorkerConfig
from antiphon.protocol.errors import ConfigError

SPLIT = "split"
COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One deployment to measure; ``name`` is SPLIT, COLOCATED or that of a server of somebody else."""

    name: str
    gpus: int
    """Ranks of all workers; on a CPU they are processes."""
    chunk_tokens: int | None = None
    """Prompt tokens that a colocated engine adds to a step of decodes."""
    config: DeploymentConfig | None = None
    """What is started; None for a server that runs already."""
    url: str | None = None
    """Where the server is that runs already; replicas with ``+`` between their URLs."""
    replicas: PeerReplicas | None = None
    """What is started where it is another system: a replica on each GPU."""

    @property
    def label(self) -> str:
        """For people."""
        return self.name if self.chunk_tokens is None else f"{self.name}, chunk {self.chunk_tokens}"


def ranks_of(config: DeploymentConfig) -> int:
    """GPUs (or CPU processes) that the workers of a deployment take."""
    return sum(pool.replicas * pool.tensor_parallel for pool in (config.prefill, config.decode))


def split_of(config: DeploymentConfig) -> Arrangement:
    """The deployment as it is written.

    Raises:
        ConfigError: it has no prefill workers.
    """
    if config.prefill.replicas < 1:
        raise ConfigError("prefill.replicas 0: the split needs prefill workers")
    return Arrangement(SPLIT, ranks_of(config), config=config)


def colocated_of(config: DeploymentConfig, chunk_tokens: int) -> Arrangement:
    """The same router and as many GPUs, with engines that do both parts.

    Each engine is a decode worker of the split that holds its experts as the prefill workers do, and has the
    pages that a chunk takes beyond those of the sequences that decode.

    Raises:
        ConfigError: the GPUs of the split are no whole number of such engines, or the chunk is none.
    """
    engine, ranks = config.decode, ranks_of(config)
    if ranks % engine.tensor_parallel:
        raise ConfigError(
            f"{ranks} GPUs of the split are no whole number of engines of {engine.tensor_parallel}"
        )
    document = config.model_dump()
    document["prefill"]["replicas"] = 0
    document["decode"] |= {
        "replicas": ranks // engine.tensor_parallel,
        "local_prefill": "always",
        "chunk_tokens": chunk_tokens,
        "fp8_experts": config.prefill.fp8_experts,
        "max_queued_requests": config.prefill.max_queued_requests + engine.max_queued_requests,
    }
    document["decode"]["kv_cache"]["sliding_pages"] += _pages_of_a_chunk(engine, chunk_tokens)
    colocated = DeploymentConfig.model_validate(document)
    return Arrangement(COLOCATED, ranks, chunk_tokens, config=colocated)


def _pages_of_a_chunk(engine: WorkerConfig, chunk_tokens: int) -> int:
    return -(-chunk_tokens // engine.kv_cache.page_size_tokens) + 1
