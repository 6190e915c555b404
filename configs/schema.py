"""The one typed configuration tree of a deployment.

Unknown keys are errors, units are in the names, and every key is documented where it is defined.
"""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pydantic
import yaml

from antiphon.protocol.errors import ConfigError


class Section(pydantic.BaseModel):
    """Base of all sections: frozen, unknown keys refused, docstrings under fields become descriptions."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    max_context_tokens: int | None = pydantic.Field(None, ge=2)
    """Prompt + output limit; the checkpoint's own when absent."""

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_name or Path(self.path).name


class KvCacheConfig(Section):
    """Size and shape of one worker's paged KV cache."""

    page_size_tokens: int = pydantic.Field(64, ge=16)
    """Positions per page."""
    full_pages: int = pydantic.Field(512, ge=2)
    """Pages of the group of full-attention layers."""
    sliding_pages: int = pydantic.Field(256, ge=2)
    """Pages of the group of sliding-window layers."""
    prefix_cache: bool = True
    """Keep finished pages for later prompts with the same beginning."""


_GRAPHED_CHUNKS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_LARGEST_WHOLE_CHUNK = 8192


def standard_graphed_chunks(chunk_tokens: int) -> tuple[int, ...]:
    """Padded sizes for which chunks are captured where the configuration says ``standard``, ascending.

    Longer ones keep the device busier than the host; whole chunks, of which a long prompt consists but for
    its end, need no padding.
    """
    whole = (chunk_tokens,) if chunk_tokens <= _LARGEST_WHOLE_CHUNK else ()
    return (*(size for size in _GRAPHED_CHUNKS if size < chunk_tokens), *whole)


class WorkerConfig(Section):
    """One pool of workers; prefill and decode have the same shape."""

    replicas: int = pydantic.Field(1, ge=0)
    """Workers of this role; 0 only of prefill, and only where decode workers compute every prompt."""
    max_replicas: int | None = pydantic.Field(None, ge=1)
    """The pool grows with its load to so many and shrinks again to ``replicas``; absent is a fixed size."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    tensor_parallel: int = pydantic.Field(1, ge=1)
    """Attention ranks per worker."""
    expert_parallel: bool = False
    """Experts are spread over the ranks (EP = TP) instead of being split."""
    gpu_share: float = pydantic.Field(1.0, gt=0, le=1)
    """Share of a GPU that a worker reserves; below 1, several workers of one rank each may share a GPU."""
    rank_timeout_s: float = pydantic.Field(120.0, gt=0)
    """A worker of several ranks ends when one of them has not answered for this long: more than its longest
    step, compilation included."""
    kv_cache: KvCacheConfig = KvCacheConfig()
    """This pool's pages."""
    chunk_tokens: int = pydantic.Field(512, ge=16)
    """Prompt tokens computed per prefill step; a multiple of the page size."""
    chunk_graph_tokens: tuple[int, ...] | Literal["standard"] = ()
    """On a GPU: the sizes, in tokens, to which chunks of prompts are padded and for
    which they are captured as CUDA graphs when the worker starts; ``standard`` are 64 and more in growing
    steps up to 2,048, and ``chunk_tokens`` where it is at most 8,192. Longer chunks, and steps of several
    prompts, are issued launch by launch; so is every chunk when this is empty."""
    max_batch_size: int = pydantic.Field(32, ge=1)
    """Sequences decoded together."""
    max_queued_requests: int = pydantic.Field(256, ge=1)
    """Requests waiting inside a worker; beyond it a request is refused."""
    max_reservations_waiting: int = pydantic.Field(8, ge=1)
    """Decode only: reservations that may wait for their KV at one time."""
    local_prefill: Literal["never", "short", "always"] = "never"
    """Decode only: which prompts a decode worker computes itself, between its decode steps and in chunks of
    ``chunk_tokens``: none, those of at most ``local_prefill_max_tokens``, or all. With ``always`` a worker is
    a colocated engine, and prefill.replicas is 0."""
    local_prefill_max_tokens: int = pydantic.Field(256, ge=1)
    """Decode only: the longest prompt that ``local_prefill: short`` computes on the decode worker; tokens of
    earlier attempts count with it."""
    cpu_threads: int = pydantic.Field(1, ge=1)
    """Torch threads of one CPU rank."""
    fp8_experts: Literal["resident", "widened"] = "widened"
    """On a GPU, how long chunks get their FP8 experts: ``resident`` holds them beside the 4-bit weights
    (gpt-oss-20b: 19 GB more), ``widened`` makes them of those while it multiplies (gpt-oss-120b on one
    card)."""
    fp8_projections: bool = False
    """On a GPU, in a worker of one rank: hold the attention's projections in FP8 as well (gpt-oss-20b: 0.65
    GB more) and multiply chunks of 1,024 tokens and more by those. Less exact: both operands are rounded to
    e4m3."""

    @pydantic.model_validator(mode="after")
    def _chunk_graphs_are_possible(self) -> WorkerConfig:
        sizes = self.chunk_graph_tokens
        if not sizes:
            return self
        if self.device == "cpu":
            raise ValueError("chunk_graph_tokens on device cpu: only GPUs replay chunks")
        if sizes == "standard":
            return self
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 2 or sizes[-1] > self.chunk_tokens:
            raise ValueError(
                f"chunk_graph_tokens {sizes} do not ascend within 2 .. chunk_tokens {self.chunk_tokens}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _projections_are_of_one_gpu(self) -> WorkerConfig:
        if self.fp8_projections and (self.device == "cpu" or self.tensor_parallel > 1):
            raise ValueError(
                f"fp8_projections on device {self.device} with tensor_parallel {self.tensor_parallel}: "
                "only a worker of one GPU has them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _ranks_agree(self) -> WorkerConfig:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError("expert_parallel is set with tensor_parallel 1: experts are spread over ranks")
        if self.gpu_share < 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"gpu_share {self.gpu_share:g} with tensor_parallel {self.tensor_parallel}: only a worker of "
                "one rank can share its GPU"
            )
        return self

    @property
    def graphed_chunk_tokens(self) -> tuple[int, ...]:
        """Padded sizes of captured chunks, ascending."""
        if self.chunk_graph_tokens == "standard":
            return standard_graphed_chunks(self.chunk_tokens)
        return self.chunk_graph_tokens

    @property
    def local_prefill_limit_tokens(self) -> float:
        """Longest prompt that a decode worker of this pool computes itself: 0 is none, infinity every one."""
        limits = {"never": 0.0, "short": float(self.local_prefill_max_tokens), "always": math.inf}
        return limits[self.local_prefill]


class TransferConfig(Section):
    """How KV moves from prefill to decode."""

    transport: Literal["nixl"] = "nixl"
    """The transport between processes."""
    layer_groups: int = pydantic.Field(2, ge=1)
    """Parts in which a chunk is shipped while later layers compute."""
    completion_timeout_s: float = pydantic.Field(5.0, gt=0)
    """A granted set without progress for this long is asked for again, then failed."""
    staging_slots: int | None = pydantic.Field(None, ge=0)
    """Slots for each pair of a prefill and a decode worker, through which pages are sent in one piece; 0
    writes every run of pages by itself. Absent: 4 between GPUs, 0 otherwise."""
    staging_slot_mib: int = pydantic.Field(32, ge=1)
    """Size of a slot, for each rank."""
    lease_s: float = pydantic.Field(15.0, gt=0)
    """A peer silent for this long is treated as dead and its work is recomputed elsewhere."""
    heartbeat_s: float = pydantic.Field(1.0, gt=0)
    """Interval of heartbeats on every link."""
    refuse_tcp: bool = False
    """Workers that would exchange KV over TCP are not paired: for GPUs, where TCP is a silent fallback."""
    verify_checksums: bool = False
    """Compare a CRC of every write where it arrives and recompute on a mismatch; host memory only, slow."""


class ResponseStoreConfig(Section):
    """Responses that later requests can refer to by id."""

    path: str | None = None
    """SQLite file; absent keeps them in the router's memory, so they end with it."""
    redis_url: str | None = None
    """Redis server that the routers of several machines share, as ``redis://host:6379/0``; ``rediss`` is TLS.
    The user may stand in it, the password comes from ANTIPHON_REDIS_PASSWORD."""
    max_bytes: int = pydantic.Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Size of all stored responses; beyond it the oldest go."""
    max_age_s: float = pydantic.Field(30 * 24 * 3600.0, gt=0)
    """A response older than this is gone."""

    @pydantic.model_validator(mode="after")
    def _one_store(self) -> ResponseStoreConfig:
        if self.path is not None and self.redis_url is not None:
            raise ValueError("path and redis_url are two stores: name one")
        return self

    @pydantic.field_validator("redis_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("redis", "rediss", "unix"):
                raise ValueError("the scheme must be redis, rediss or unix")
            if parts.password is not None:
                raise ValueError("a password does not belong here: it comes from ANTIPHON_REDIS_PASSWORD")
        return url


class KeyLimitsConfig(Section):
    """What one API key may use at one router; without keys all clients together count as one."""

    max_concurrent_requests: int | None = pydantic.Field(None, ge=1)
    """Requests at one time; absent is no limit."""
    requests_per_minute: int | None = pydantic.Field(None, ge=1)
    """Absent is no limit."""
    tokens_per_minute: int | None = pydantic.Field(None, ge=1)
    """Prompt and output together; absent is no limit."""


class RouterConfig(Section):
    """The HTTP front end."""

    replicas: int = pydantic.Field(1, ge=1)
    """Router processes."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = pydantic.Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    max_in_flight_requests: int = pydantic.Field(256, ge=1)
    """Requests admitted at one time."""
    max_queued_requests: int = pydantic.Field(256, ge=0)
    """Requests waiting for admission; beyond it 429."""
    max_body_bytes: int = pydantic.Field(16 * 1024 * 1024, ge=1024)
    """Largest request body; beyond it 413."""
    request_timeout_s: float = pydantic.Field(600.0, gt=0)
    """Deadline of a request that names none."""
    max_attempts: int = pydantic.Field(3, ge=1)
    """Prefill attempts per request before it ends with an error."""
    slow_client_buffer_tokens: int = pydantic.Field(8192, ge=64)
    """Tokens held for a client that reads too slowly before it is cut off."""
    sse_keep_alive_s: float = pydantic.Field(15.0, gt=0)
    """A stream without an event for this long sends a comment line, so that no proxy closes it."""
    worker_replacement_wait_s: float = pydantic.Field(120.0, ge=0)
    """A request whose worker died waits this long for another one; a new request does not wait."""
    drain_notice_s: float = pydantic.Field(0.0, ge=0)
    """A router that stops first takes requests for so long while /ready says no: more than a load balancer's
    interval of health checks, where one stands in front."""
    drain_timeout_s: float = pydantic.Field(60.0, ge=0)
    """A router that stops lets its open requests finish for this long, the notice before included."""
    api_key_file: str | None = None
    """File of accepted API keys, one per line, read again when it changes; ANTIPHON_API_KEYS adds more."""
    key_limits: KeyLimitsConfig = KeyLimitsConfig()
    """Limits of every API key; beyond one of them 429."""
    response_store: ResponseStoreConfig = ResponseStoreConfig()
    """Where stored responses are kept."""
    tls_certificate_file: str | None = None
    """PEM file of the certificate chain; with it and its key the API is HTTPS."""
    tls_key_file: str | None = None
    """PEM file of the certificate's private key."""
    current_date: datetime.date | None = None
    """The date that prompts name; today's (UTC) when absent. A fixed one keeps caches past midnight."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser; none unless named, ``*`` is all."""

    @pydantic.model_validator(mode="after")
    def _certificate_has_its_key(self) -> RouterConfig:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together: one is missing")
        return self


class RayConfig(Section):
    """How the deployment meets its Ray cluster."""

    address: str | None = None
    """Address of a running cluster; absent starts a local one that ends with the deployment."""
    role_resources: bool = False
    """Each process also reserves 1 of its role's custom resource (``antiphon_prefill``, ``antiphon_decode``,
    ``antiphon_router``), so that it runs only on nodes that were started with it; a running cluster only."""
    revision: str = pydantic.Field("", max_length=20, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """Names the present form of the workers; ``antiphon upgrade`` goes from one to the next. With
    ``role_resources`` workers then reserve ``antiphon_prefill_NAME`` and ``antiphon_decode_NAME`` instead, so
    that those of two revisions run on nodes of their own."""
    placement_timeout_s: float = pydantic.Field(60.0, gt=0)
    """The cluster must have room for every process after this long; more where nodes are still coming up."""

    @pydantic.model_validator(mode="after")
    def _resources_are_of_a_running_cluster(self) -> RayConfig:
        if self.role_resources and self.address is None:
            raise ValueError("role_resources needs address: a cluster of the deployment's own has none")
        return self


class AutoscaleConfig(Section):
    """When pools that have ``max_replicas`` change their size."""

    interval_s: float = pydantic.Field(5.0, gt=0)
    """How often the load is looked at."""
    prefill_backlog_s: float = pydantic.Field(2.0, gt=0)
    """More prefill workers when the prompts that wait would take the pool longer than this."""
    decode_page_use: float = pydantic.Field(0.8, gt=0, lt=1)
    """More decode workers when a larger share of their KV pages is held, or requests wait for pages."""
    shrink_after_s: float = pydantic.Field(120.0, ge=0)
    """One worker fewer after the pool was too large for this long."""


class LogConfig(Section):
    """What every process writes to standard error, as JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""


class KernelsConfig(Section):
    """Kernels of workers on GPUs."""

    require_built: bool = False
    """A worker on a GPU takes its Triton kernels from ANTIPHON_KERNEL_LIBRARY_DIR, where ``antiphon kernels
    build`` put them, refuses to start when some that its layout needs are missing, which it names, and never
    compiles; CUDA libraries are never compiled by a worker in any case."""


class WeightCacheConfig(Section):
    """Experts kept on disk as the kernels of an H200 read them, so that the next worker need not convert."""

    directory: str | None = None
    """Folder for them, on every node that has workers on GPUs; ``~`` is the home of whoever runs the workers.
    Absent converts at every start. A folder that is full or not writable costs a start its time, no more."""
    limit_gib: float = pydantic.Field(256.0, gt=0)
    """What all files in it may take; the least recently used go first. A checkpoint takes as much as its
    experts do in MXFP4, and twice that on top with ``fp8_experts: resident``."""


class MetricsConfig(Section):
    """Prometheus metrics. A router has them at /metrics of its API; other processes listen for them alone."""

    host: str = "127.0.0.1"
    """Address that workers and the supervisor listen on."""
    supervisor_port: int = pydantic.Field(0, ge=0, le=65535)
    """Port of the supervisor, which also lists every process at /targets; 0 picks a free one."""
    worker_port: int = pydantic.Field(0, ge=0, le=65535)
    """First port of workers: those of one node take it and the ones after it; 0 picks free ones."""
    compat: Literal["vllm"] | None = None
    """``vllm``: figures that vLLM also has appear a second time under its names, for existing dashboards."""


class TracingConfig(Section):
    """OpenTelemetry spans of requests."""

    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, such as ``http://collector:4318``; absent records nothing."""
    sample_ratio: float = pydantic.Field(0.1, ge=0, le=1)
    """Share of requests that are recorded, of those whose ``traceparent`` does not decide it."""


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
        sizes = (self.prefill.kv_cache.page_size_tokens, self.decode.kv_cache.page_size_tokens)
        if self.prefill.replicas and sizes[0] != sizes[1]:
            raise ValueError(f"kv_cache.page_size_tokens differs: prefill {sizes[0]}, decode {sizes[1]}")
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            page = worker.kv_cache.page_size_tokens
            if worker.chunk_tokens % page:
                raise ValueError(
                    f"{role}.chunk_tokens {worker.chunk_tokens} is not a multiple of the page size {page}"
                )
        return self

    def staging_slots(self, role: Literal["prefill", "decode"]) -> int:
        """Staging slots of each rank of a worker: its own to gather into, or those of all its writers.

        A decode worker has room for one writer more than there are, for a worker that takes another's place.
        """
        on_gpus = self.prefill.device == self.decode.device == "cuda"
        asked = self.transfer.staging_slots
        each = (4 if on_gpus else 0) if asked is None else asked
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


def load_deployment(path: Path, overrides: dict[str, object] | None = None) -> DeploymentConfig:
    """Read a deployment file; ``overrides`` maps dotted keys (``router.port``) to values.

    Raises:
        ConfigError: no such file, not YAML, an unknown key or a bad value; names file, key and value.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    for dotted, value in (overrides or {}).items():
        _set_dotted(tree, dotted, value)
    try:
        return DeploymentConfig.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_describe(e) for e in error.errors())) from error


def _set_dotted(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    node = tree
    for key in parents:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {key} is not a section")
        node = child
    node[leaf] = value


_CREDENTIALS = re.compile(r"://[^/@\s]*@")
"""User and password of a URL: an error says what is wrong without them."""


def _describe(error: object) -> str:
    assert isinstance(error, dict)
    where = ".".join(str(part) for part in error["loc"]) or "deployment"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    described = f"{where}: {error['msg']} (got {error['input']!r})" if error["loc"] else f"{error['msg']}"
    return _CREDENTIALS.sub("://***@", described)
