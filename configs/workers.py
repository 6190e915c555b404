"""Sections of the workers: their pools, their pages, how these move, and their kernels and weights."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from antiphon.configs.section import Section


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
    chunk_graph_tokens: tuple[int, ...] | Literal["standard"] | None = None
    """On a GPU: the sizes, in tokens, to which chunks of prompts are padded and for
    which they are captured as CUDA graphs when the worker starts; ``standard`` are 64 and more in growing
    steps up to 2,048, and ``chunk_tokens`` where it is at most 8,192. Longer chunks, and steps of several
    prompts, are issued launch by launch; so is every chunk when this is empty. Absent: ``standard``
    on a GPU."""
    max_batch_size: int = pydantic.Field(32, ge=1)
    """Sequences decoded together."""
    max_queued_requests: int = pydantic.Field(256, ge=1)
    """Requests waiting inside a worker; beyond it a new one is refused."""
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
    """On a GPU, how chunks and steps of many tokens get their FP8 experts: ``resident`` holds them beside the
    4-bit weights (gpt-oss-20b: 19 GB more), ``widened`` makes them of those while it multiplies (gpt-oss-120b
    on one card), as is always done with experts that ranks split. With either, activations are rounded to
    e4m3: from 257 tokens on, ``widened`` on one GPU from 81 of gpt-oss-20b and 129 of gpt-oss-120b."""
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
        sizes = self.chunk_graph_tokens
        if sizes is None:
            sizes = "standard" if self.device == "cuda" else ()
        return standard_graphed_chunks(self.chunk_tokens) if sizes == "standard" else sizes

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
    """Parts in which a chunk is shipped while later layers compute; of three and more, the last is one
    layer of each kind."""
    completion_timeout_s: float = pydantic.Field(5.0, gt=0)
    """A granted set without progress for this long is asked for again, then failed."""
    same_host: Literal["auto", "required", "never"] = "auto"
    """Between GPUs of one host, a prefill worker's GPU may write straight into the pages of a decode worker,
    which it maps (CUDA IPC). ``auto`` does so where it can, ``required`` pairs no workers that cannot,
    ``never`` treats every peer as one of another host."""
    staging_slots: int | None = pydantic.Field(None, ge=0)
    """Slots for each pair of a prefill and a decode worker, through which pages are sent in one piece to a
    GPU that is not written directly; 0 writes every run of pages by itself. Absent: 4 between GPUs, but 0
    with ``same_host: required``; 0 otherwise."""
    staging_slot_mib: int = pydantic.Field(64, ge=1)
    """Size of a slot, for each rank."""
    lease_s: float = pydantic.Field(15.0, gt=0)
    """A peer silent for this long is treated as dead and its work is recomputed elsewhere."""
    heartbeat_s: float = pydantic.Field(1.0, gt=0)
    """Interval of heartbeats on every link."""
    refuse_tcp: bool = False
    """Workers that would exchange KV over TCP are not paired: for GPUs, where TCP is a silent fallback."""
    verify_checksums: bool = False
    """Compare a CRC of every write where it arrives and recompute on a mismatch; host memory only, slow."""


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
