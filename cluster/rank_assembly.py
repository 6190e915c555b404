"""Joins the ranks of one worker: rank 0's model for an engine, and what the other ranks do all their life."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import WorkerConfig
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.kv_mapping import host_mapping
from antiphon.engine.kv_staging import make_staging
from antiphon.engine.settings import EngineSettings
from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint, nixl_transport
from antiphon.kv_transfer.mapped_transport import Side, with_same_host
from antiphon.kv_transfer.measured_transport import WriteLog, measured
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.rank_server import RankServer
from antiphon.kv_transfer.step_fences import StepFences
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.forward import KvLayers, LanguageModel, ReservesForPages
from antiphon.model.parallel.commands import RankModel
from antiphon.model.parallel.follower import FollowerLoop
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.leader import LeaderModel
from antiphon.model.parallel.load import load_parallel_model
from antiphon.model.parallel.rank_group import RankGroup, open_store
from antiphon.model.weight_cache.store import WeightCache
from antiphon.prefill_worker.orders import source_fence
from antiphon.protocol.codec import decode
from antiphon.protocol.errors import AntiphonError, ConfigError, WireError
from antiphon.protocol.identity import Role
from antiphon.protocol.link import LinkSettings
from antiphon.protocol.rank_messages import RankMeeting, StepMark

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_TIMEOUT_S = 3600.0
"""Longest that one rank may take to load longer than another."""


def worker_config(role: Role, config: DeploymentConfig) -> WorkerConfig:
    """The pool of a role."""
    return config.prefill if role is Role.PREFILL else config.decode


def engine_settings(role: Role, config: DeploymentConfig, model: RankModel) -> EngineSettings:
    """Sizes that all ranks of a worker share."""
    return EngineSettings.resolve(
        worker_config(role, config),
        model.config,
        max_context_tokens=config.model.max_context_tokens,
        layer_groups=config.transfer.layer_groups,
    )


def reserve_for_prompts(role: Role, mine: WorkerConfig, model: LanguageModel, kv: KvLayers) -> None:
    """Have what a worker that computes prompts needs besides its pages, while it still may fail to start."""
    computes = role is Role.PREFILL or mine.local_prefill != "never"
    if computes and isinstance(model, ReservesForPages):
        model.reserve_for_chunks(kv)


def rank_device(mine: WorkerConfig, rank: int) -> torch.device:
    """Where a rank computes; its process sees the GPUs of all ranks, in their order."""
    return torch.device("cuda", rank) if mine.device == "cuda" else torch.device("cpu")


def load_rank(role: Role, config: DeploymentConfig, rank: int, store: Store) -> tuple[RankModel, RankGroup]:
    """Join the other ranks and load one rank's part of the model.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the model cannot be spread this way.
        RankLostError: the others did not come.
    """
    mine = worker_config(role, config)
    torch.set_num_threads(mine.cpu_threads)
    device = rank_device(mine, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup.join(
        store,
        rank,
        mine.tensor_parallel,
        device=device,
        timeout_s=mine.rank_timeout_s,
        join_timeout_s=config.ray.placement_timeout_s,
        load_timeout_s=LOAD_TIMEOUT_S,
    )
    layout = ParallelLayout(mine.tensor_parallel, mine.expert_parallel, rank)
    path, samples = Path(config.model.path), role is Role.DECODE
    dtype = DTYPES[config.model.dtype]
    try:
        if device.type == "cpu":
            plain = load_parallel_model(path, layout, group.communicator, dtype, with_unembedding=samples)
            return plain, group
        from antiphon.model.cuda_roads import require_fp8_pages
        from antiphon.model.parallel.cuda_load import load_cuda_rank  # loads Triton

        if config.model.dtype != "bfloat16":
            raise ConfigError(f"model.dtype {config.model.dtype}: a GPU computes in bfloat16")
        if config.model.fp8_kv:
            require_fp8_pages(device)
        if config.kernels.require_built:
            require_built_kernels(path, mine, device, fp8_kv=config.model.fp8_kv)
        fast = load_cuda_rank(
            *(path, layout, group.communicator, store, device),
            with_unembedding=samples,
            resident_fp8=mine.fp8_experts == "resident",
            weight_cache=weight_cache(config),
        )
    except BaseException:
        group.close()  # the others need not wait
        raise
    _log.info("%s rank %d runs on %s", role, rank, fast.road)
    inexact, blocks = fast.inexact_blocks
    if inexact:
        _log.warning(
            "rank %d: %d of %d blocks of expert weights may lose bits in long chunks", rank, inexact, blocks
        )
    return fast, group


def weight_cache(config: DeploymentConfig) -> WeightCache | None:
    """Where converted experts are kept; None keeps none."""
    settings = config.weight_cache
    if settings.directory is None:
        return None
    return WeightCache(Path(settings.directory).expanduser(), int(settings.limit_gib * 2**30))


def require_built_kernels(
    checkpoint: Path, mine: WorkerConfig, device: torch.device | str, *, fp8_kv: bool
) -> None:
    """Load every kernel of this worker's ranks, or refuse to start.

    Raises:
        KernelLibraryError: some were not built; names them.
        ConfigError: the model cannot be spread this way.
    """
    from antiphon.model.ahead import WorkerShape, require_built  # loads Triton

    layout = ParallelLayout(mine.tensor_parallel, mine.expert_parallel)
    shape = WorkerShape(layout, mine.kv_cache.page_size_tokens, mine.max_batch_size, fp8_kv)
    require_built(open_checkpoint(checkpoint).config, shape, device)


class LeaderFollowers:
    """Implements ``kv_transfer.worker_kv.Followers`` with the commands of a ``LeaderModel``."""

    def __init__(self, leader: LeaderModel, layer_groups: int) -> None:
        self._leader = leader
        self._last_group = layer_groups - 1

    @property
    def size(self) -> int:
        """See Followers."""
        return self._leader.size

    def publish(self, message: bytes) -> None:
        """See Followers."""
        self._leader.publish(message)

    def mark(self, layer_group: int) -> StepMark:
        """See Followers. Between two steps everything up to the end of the last one was issued."""
        return StepMark(self._leader.steps, layer_group if self._leader.computing else self._last_group)

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """See Followers."""
        self._leader.watch(on_lost)

    def close(self) -> None:
        """See Followers. A rank that is lost by now was told of before, or ends with its process."""
        try:
            self._leader.close()
        except AntiphonError as error:
            _log.warning("the ranks did not end in good order: %s", error)


def follow(
    role: Role,
    config: DeploymentConfig,
    rank: int,
    port: int,
    *,
    cluster_token: str,
    transport_factory: TransportFactory | None = None,
) -> None:
    """The whole life of a rank other than 0; returns when rank 0 says stop.

    Args:
        port: where rank 0's store listens on this host.

    Raises:
        CheckpointError, ConfigError: as ``load_rank``, or rank 0 was given other sizes.
        RankLostError: another rank died or hangs.
    """
    size = worker_config(role, config).tensor_parallel
    store = open_store(rank, size, port=port, timeout_s=config.ray.placement_timeout_s)
    follow_in(store, role, config, rank, cluster_token=cluster_token, transport_factory=transport_factory)


def follow_in(
    store: Store,
    role: Role,
    config: DeploymentConfig,
    rank: int,
    *,
    cluster_token: str,
    transport_factory: TransportFactory | None = None,
) -> None:
    """As ``follow``, in a store that is open already."""
    model, group = load_rank(role, config, rank, store)
    with contextlib.ExitStack() as ends:
        ends.callback(group.close)  # the others need not wait for a rank that does not come so far
        pages = _pages(role, config, model, group)
        reserve_for_prompts(role, worker_config(role, config), model, pages)
        rank_kv = FollowerKv(role, config, rank, pages, cluster_token, transport_factory)
        ends.callback(rank_kv.stop)
        FollowerLoop(
            model,
            pages,
            group,
            after_layer=rank_kv.after_layer if role is Role.PREFILL else None,
            on_message=rank_kv.on_message,
            on_lost=lambda error: rank_kv.hang_up(),
            group_ends=pages.last_layers(config.transfer.layer_groups),
        ).run()


def _pages(role: Role, config: DeploymentConfig, model: RankModel, group: RankGroup) -> PagedKvCache:
    """One rank's pages; raises ConfigError when they are too few."""
    settings = engine_settings(role, config, model)
    return PagedKvCache(
        model.config,
        full_pages=settings.full_pages,
        sliding_pages=settings.sliding_pages,
        page_size=settings.page_size_tokens,
        dtype=DTYPES[config.model.dtype],
        device=model.device,
        kv_heads=model.config.num_key_value_heads // group.size,
        full_fp8=config.model.fp8_kv,
    )


class FollowerKv:
    """The KV side of a rank other than 0: records how far its steps are, and serves rank 0's calls."""

    def __init__(
        self,
        role: Role,
        config: DeploymentConfig,
        rank: int,
        pages: PagedKvCache,
        cluster_token: str,
        transport_factory: TransportFactory | None,
    ) -> None:
        self._role = role
        self._config = config
        self._rank = rank
        self._pages = pages
        self._cluster_token = cluster_token
        self._writes = WriteLog()
        transports = with_same_host(
            transport_factory or nixl_transport,
            Side.WRITES if role is Role.PREFILL else Side.IS_WRITTEN,
            host_mapping(config, pages.device),
        )
        self._transport_factory = measured(transports, self._writes)
        self._fences = StepFences()
        last_layers = pages.last_layers(config.transfer.layer_groups)
        self._group_after = {layer: group for group, layer in enumerate(last_layers)}
        self._server: RankServer | None = None

    def after_layer(self, step: int, layer: int) -> None:
        """Note that a layer of a step was issued; see FollowerLoop."""
        group = self._group_after.get(layer)
        if group is not None:
            self._fences.record(StepMark(step, group), source_fence(self._pages.device))

    def on_message(self, payload: bytes) -> None:
        """Rank 0 says where it listens.

        Raises:
            TransferError: the transport cannot be opened here.
            WireError: it said something else.
        """
        meeting = decode(payload)
        if not isinstance(meeting, RankMeeting):
            raise WireError(f"rank 0 published a {type(meeting).__name__}")
        transfer = self._config.transfer
        self._server = RankServer(
            self._role,
            self._rank,
            meeting,
            self._cluster_token,
            LinkSettings(heartbeat_s=transfer.heartbeat_s, lease_s=transfer.lease_s),
            self._make_endpoint,
            lambda error: _log.error("rank %d: transfers ended: %r", self._rank, error),
            self._writes.take,
        )
        self._server.start()

    def hang_up(self) -> None:
        """Let rank 0 know at once that this rank ends, however long that takes."""
        if self._server is not None:
            self._server.hang_up()

    def stop(self) -> None:
        """End transfers."""
        if self._server is not None:
            self._server.stop()

    def _make_endpoint(
        self,
        meeting: RankMeeting,
        on_landed: Callable[[str, bytes], None],
        on_failure: Callable[[BaseException], None],
    ) -> KvEndpoint:
        model, transfer = self._config.model, self._config.transfer
        return KvEndpoint(
            EndpointSettings(
                meeting.worker_id,
                meeting.epoch,
                self._pages.fingerprint(model.name, model.revision or ""),
                transfer.layer_groups,
                transfer.completion_timeout_s,
                transfer.verify_checksums,
            ),
            Shard(worker_config(self._role, self._config).tensor_parallel, self._rank),
            self._pages,
            self._fences,
            staging=make_staging(
                self._pages,
                self._config.staging_slots("prefill" if self._role is Role.PREFILL else "decode"),
                transfer.staging_slot_mib,
            ),
            on_notification=_unexpected,
            on_landed=on_landed,
            on_failure=on_failure,
            transport_factory=self._transport_factory,
        )


def _unexpected(sender: str, payload: bytes) -> None:
    """Writers notify rank 0 of a worker only."""
    _log.warning("a notification of %d bytes from %s came to another rank", len(payload), sender)


def lead(role: Role, config: DeploymentConfig, store: Store) -> LeaderModel:
    """Rank 0: join, load, and meet the others when they have loaded too.

    Raises:
        CheckpointError, ConfigError, RankLostError: see ``load_rank`` and ``LeaderModel.start``.
    """
    model, group = load_rank(role, config, 0, store)
    leader = LeaderModel(model, group)
    leader.start()
    return leader
