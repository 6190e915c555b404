"""Whether a deployment's layouts fit its model and its GPUs: pure arithmetic, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import WorkerConfig
from antiphon.kernels.fp8_pages import head_bytes
from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.checkpoint.layout import TensorKind
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.reduce_limits import limits_of
from antiphon.model.parallel.sizes import rank_bytes
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import Role

GIB = 2**30
GPU_MEMORY_BYTES = 139 * GIB
"""Of an H200, as its driver offers it."""
CONTEXT_BYTES = 3 * GIB
"""CUDA context, libraries, communicators, the allocator's slack and captured graphs of one process."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
WIDE_TILE = 256
"""Tokens of the experts' largest tile (``kernels.moe.mixed``, which this module must not load)."""
FP8_TILE, FP8_SCALE_BYTES = 128, 4
"""Rows and columns of an FP8 block with one scale (``kernels.moe.fp8_weights``, the same)."""


def pools(config: DeploymentConfig) -> Iterator[tuple[Role, WorkerConfig]]:
    """The pools that have workers."""
    for role, worker in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        if worker.replicas:
            yield role, worker


def layout_of(worker: WorkerConfig, rank: int = 0) -> ParallelLayout:
    """One rank of a worker of this pool."""
    return ParallelLayout(worker.tensor_parallel, worker.expert_parallel, rank)


def check_layouts(config: DeploymentConfig, model: GptOssConfig) -> None:
    """Whether the model can be spread as each pool asks, and handed over in so many groups of layers.

    Raises:
        ConfigError: it cannot; names the pool, the number of ranks and what they do not divide, or how many
            groups there may be.
    """
    for role, worker in pools(config):
        try:
            layout_of(worker).check(model)
        except ConfigError as error:
            raise ConfigError(f"{role}.tensor_parallel: {worker.tensor_parallel}: {error}") from error
    fewest = min(len(model.full_layers), len(model.sliding_layers))
    if config.transfer.layer_groups > fewest:
        raise ConfigError(f"transfer.layer_groups {config.transfer.layer_groups} is not within 1 .. {fewest}")


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Bytes of one rank of a pool, the largest of its ranks.

    Attributes:
        processes: ranks of the whole pool.
        gpu_share: what one of them reserves of a GPU; 0 on a CPU.
        weights: parameters in every form in which they are held.
        pages: both page groups, probe pages included.
        workspace: activations of the largest step, and on a GPU what ranks share for their sums and what
            the process takes besides.
    """

    role: Role
    layout: str
    processes: int
    gpu_share: float
    weights: int
    pages: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.pages + self.workspace


def rank_needs(config: DeploymentConfig, model: GptOssConfig) -> tuple[RankNeeds, ...]:
    """What one rank of each pool takes.

    Raises:
        ConfigError: see ``check_layouts``.
    """
    check_layouts(config, model)
    return tuple(
        RankNeeds(
            role=role,
            layout=layout_of(worker).name,
            processes=worker.replicas * worker.tensor_parallel,
            gpu_share=worker.gpu_share if worker.device == "cuda" else 0.0,
            weights=_weight_bytes(config, role, worker, model),
            pages=_page_bytes(config, worker, model),
            workspace=_workspace_bytes(config, role, worker, model),
        )
        for role, worker in pools(config)
    )


def check_memory(needs: tuple[RankNeeds, ...], gpu_memory_bytes: int = GPU_MEMORY_BYTES) -> None:
    """Whether every GPU holds the ranks that may be put on it together.

    Raises:
        ConfigError: it does not; says what is needed of what, pool by pool.
    """
    for each in needs:
        if each.gpu_share == 1:
            _check_one([(each, 1)], gpu_memory_bytes)
    _check_one(_fullest_shared_gpu(needs), gpu_memory_bytes)


def _fullest_shared_gpu(needs: tuple[RankNeeds, ...]) -> list[tuple[RankNeeds, int]]:
    """Ranks that reserve shares, as they take most memory on one GPU: the heaviest for their share first."""
    left = 1.0
    together = []
    sharing = [each for each in needs if 0 < each.gpu_share < 1]
    for each in sorted(sharing, key=lambda each: each.total / each.gpu_share, reverse=True):
        count = min(each.processes, int(left / each.gpu_share + 1e-9))
        left -= count * each.gpu_share
        together.append((each, count))
    return together


def gpus_of(needs: tuple[RankNeeds, ...]) -> int:
    """GPUs that a deployment takes."""
    return math.ceil(sum(each.gpu_share * each.processes for each in needs) - 1e-9)


def table(needs: tuple[RankNeeds, ...], gpu_memory_bytes: int = GPU_MEMORY_BYTES) -> str:
    """The needs as a table in GiB, one line per pool."""
    heads = ("pool", "layout", "ranks", "weights", "pages", "workspace", "of a rank", "of a GPU")
    rows: list[tuple[str, ...]] = [heads]
    for each in needs:
        share = f"{each.total / gpu_memory_bytes:.0%}" if each.gpu_share else "-"
        sizes = [f"{value / GIB:.2f}" for value in (each.weights, each.pages, each.workspace, each.total)]
        rows.append((str(each.role), each.layout, str(each.processes), *sizes, share))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _check_one(together: list[tuple[RankNeeds, int]], gpu_memory_bytes: int) -> None:
    total = sum(each.total * count for each, count in together)
    if total <= gpu_memory_bytes:
        return
    parts = "; ".join(
        f"{count} x {each.role} {each.layout}: {each.weights / GIB:.1f} weights "
        f"+ {each.pages / GIB:.1f} pages + {each.workspace / GIB:.1f} workspace"
        for each, count in together
    )
    raise ConfigError(
        f"{total / GIB:.1f} GiB on one GPU of {gpu_memory_bytes / GIB:.1f} GiB ({parts}, in GiB): "
        "fewer pages, more ranks or fp8_experts: widened"
    )


def _weight_bytes(config: DeploymentConfig, role: Role, worker: WorkerConfig, model: GptOssConfig) -> int:
    """Of the rank that holds most."""
    return max(_weights_of(config, role, worker, model, rank) for rank in {0, worker.tensor_parallel - 1})


def _weights_of(
    config: DeploymentConfig, role: Role, worker: WorkerConfig, model: GptOssConfig, rank: int
) -> int:
    stored = rank_bytes(model, layout_of(worker, rank), with_unembedding=role is Role.DECODE)
    experts = stored.get(TensorKind.EXPERT_MATRIX, 0), stored.get(TensorKind.EXPERT_SCALE, 0)
    values = 2 * experts[0]  # two to a byte
    rest = sum(stored.values()) - sum(experts)
    if worker.device == "cpu":
        size = DTYPE_BYTES[config.model.dtype]
        return (rest // 2 + values) * size
    projections = _projection_bytes(model) if worker.fp8_projections else 0
    splits = worker.tensor_parallel > 1 and not worker.expert_parallel
    if worker.fp8_experts == "resident" and not splits:
        return sum(stored.values()) + projections + values
    # A byte for the exponent of every row, which has a bias of two.
    return sum(stored.values()) + projections + stored.get(TensorKind.EXPERT_BIAS, 0) // 2


def _projection_bytes(model: GptOssConfig) -> int:
    """Of all layers' FP8 projections of the attention."""
    heads = model.num_attention_heads * model.head_dim
    rows = heads + 2 * model.num_key_value_heads * model.head_dim
    tiles = sum(
        math.ceil(a / FP8_TILE) * math.ceil(b / FP8_TILE)
        for a, b in ((rows, model.hidden_size), (model.hidden_size, heads))
    )
    return model.num_hidden_layers * tiles * (FP8_TILE**2 + FP8_SCALE_BYTES)


def _page_bytes(config: DeploymentConfig, worker: WorkerConfig, model: GptOssConfig) -> int:
    cache = worker.kv_cache
    heads = model.num_key_value_heads // worker.tensor_parallel
    plain = heads * _head_page_bytes(config, worker, model)
    each = heads * head_bytes(cache.page_size_tokens, model.head_dim) if config.model.fp8_kv else plain
    full = (cache.full_pages + 1) * len(model.full_layers)
    sliding = (cache.sliding_pages + 1) * len(model.sliding_layers)
    return each * full + plain * sliding


def _head_page_bytes(config: DeploymentConfig, worker: WorkerConfig, model: GptOssConfig) -> int:
    """Keys and values of one head of one layer's page in the model's dtype."""
    return 2 * worker.kv_cache.page_size_tokens * model.head_dim * DTYPE_BYTES[config.model.dtype]


def _workspace_bytes(config: DeploymentConfig, role: Role, worker: WorkerConfig, model: GptOssConfig) -> int:
    """An upper estimate: residual stream, norm, projection, experts' inputs and outputs, logits, staging.

    On a GPU every expert's last tile of tokens may be nearly empty.
    """
    size = DTYPE_BYTES[config.model.dtype]
    computes = role is Role.PREFILL or worker.local_prefill != "never"
    tokens = max(worker.max_batch_size, worker.chunk_tokens if computes else 0)
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) // worker.tensor_parallel
    per_token = 4 * model.hidden_size + 2 * heads * model.head_dim
    per_pair = 3 * (model.intermediate_size + MXFP4_BLOCK)
    experts = model.num_experts // (worker.tensor_parallel if worker.expert_parallel else 1)
    spare = experts * WIDE_TILE if worker.device == "cuda" else 0
    activations = (tokens * (per_token + model.experts_per_token * per_pair) + spare * per_pair) * size
    if computes and worker.fp8_projections:
        width = model.num_attention_heads * model.head_dim
        activations += (tokens + WIDE_TILE) * math.ceil(width / FP8_TILE) * (FP8_TILE + FP8_SCALE_BYTES)
    if computes and worker.device == "cuda" and config.model.fp8_kv:
        # A full layer's pages, widened for the prompt's attention.
        ranks = worker.tensor_parallel
        page = model.num_key_value_heads // ranks * _head_page_bytes(config, worker, model)
        activations += (worker.kv_cache.full_pages + 1) * page
    logits = 3 * 4 * worker.max_batch_size * model.vocab_size if role is Role.DECODE else 0
    slots = config.staging_slots("prefill" if role is Role.PREFILL else "decode")
    staging = slots * config.transfer.staging_slot_mib * 2**20
    # What graphs compute in is set apart; all sizes share what the largest needs. Experts' buffers serve
    # other steps too.
    graphed = max(worker.graphed_chunk_tokens, default=0) if computes else 0
    graphs = graphed * (4 * model.hidden_size + 2 * heads * model.head_dim) * size
    if worker.device == "cpu":
        return activations + graphs + logits + staging
    ranks = worker.tensor_parallel
    sums = limits_of(ranks).shared_bytes(model.hidden_size, ranks) if ranks > 1 else 0
    return activations + graphs + logits + staging + sums + CONTEXT_BYTES
