"""Every launch of a Triton kernel that a worker on H200s makes, to be compiled or loaded ahead.

Kernels are specialised by the shape of the model, by what a rank holds of it and by how a batch is cut up,
not by the length of a prompt. A kernel that a worker meets and that is not launched here would be found
missing by ``require_built``'s ban.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels import page_copy
from antiphon.kernels.ahead import load_only, missing_kernels, triton_folder
from antiphon.kernels.attention import fp8_hopper, prefill_hopper
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.attention.decode_fp8 import Fp8DecodeAttention
from antiphon.kernels.attention.prefill import prefill_attention
from antiphon.kernels.attention.split_parts import SplitParts
from antiphon.kernels.attention.widen import WidePages
from antiphon.kernels.collectives import peer_reduce
from antiphon.kernels.cuda_library import CudaLibrary, KernelLibraryError
from antiphon.kernels.dense import skinny
from antiphon.kernels.dense.norm import add_rms_norm_, rms_norm
from antiphon.kernels.dense.rope import rope_and_write
from antiphon.kernels.fp8_pages import Fp8Pages, head_bytes
from antiphon.kernels.ipc.library import LIBRARY as IPC_LIBRARY
from antiphon.kernels.moe import build as moe_build
from antiphon.kernels.rank_sampling import best_tokens, block_sums, drawn_tokens
from antiphon.kernels.reference import PagedSequences
from antiphon.kernels.router import route
from antiphon.kernels.sampling import best_of_parts, choose_tokens
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_roads import hopper_obstacle
from antiphon.model.parallel.layout import ParallelLayout

_LONG_CHUNK = 4096
"""Beyond what is routed in small blocks."""
_NAMED = 8
"""Missing kernels that a message names."""


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What kernels of a worker depend on, besides its model.

    Attributes:
        layout: any rank's; all ranks of a worker launch the same kernels.
        page_size: positions of a page.
        max_batch_size: sequences decoded together, at most.
        fp8_kv: pages of full layers hold FP8.
    """

    layout: ParallelLayout
    page_size: int
    max_batch_size: int
    fp8_kv: bool = False


class Launches:
    """The launches of one worker, on any device within ``compile_only`` or ``missing_kernels``.

    Raises:
        ConfigError: the model cannot be spread this way.
    """

    def __init__(self, config: GptOssConfig, shape: WorkerShape, device: torch.device | str) -> None:
        self._config, self._shape, self._device = config, shape, device
        self._rank = shape.layout.shape(config)
        self._alone = shape.layout.tensor_parallel == 1
        heads, width = (len(self._rank.heads), len(self._rank.kv_heads)), config.head_dim
        self._heads, self._kv_heads = heads
        # One layer of a group of several.
        self._cache = self._empty(1, 2, self._kv_heads, 2, shape.page_size, width)[:, 0]
        size = head_bytes(shape.page_size, width)
        self._fp8 = (
            Fp8Pages(self._empty(1, 2, self._kv_heads, size, dtype=torch.uint8)[:, 0], shape.page_size, width)
            if shape.fp8_kv
            else None
        )

    def all(self) -> None:
        """Make every one of them."""
        self._around()
        self._chunk_attention()
        for batch in range(1, self._shape.max_batch_size + 1):
            self._decode_attention(batch)
            self._sampling(batch)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _around(self) -> None:
        """Norms, rotation and router."""
        config, heads, width = self._config, self._heads, self._config.head_dim
        for tokens in (32, _LONG_CHUNK):
            x, weight = self._empty(tokens, config.hidden_size), self._empty(config.hidden_size)
            rms_norm(x, weight, config.rms_norm_eps)
            add_rms_norm_(x, torch.empty_like(x), weight, config.rms_norm_eps)
            router = self._empty(config.num_experts, config.hidden_size), self._empty(config.num_experts)
            route(x, *router, config.experts_per_token)
            route(x, *router, config.experts_per_token, self._zeros(1))
        slots, positions = (self._zeros(32, dtype=torch.int64) for _ in range(2))
        qkv, rotation = (
            self._empty(32, (heads + 2 * self._kv_heads) * width),
            self._empty(1, width // 2, 2, dtype=torch.float32),
        )
        query = self._empty(32, heads, width)
        rope_and_write(qkv, positions, slots, rotation, self._cache, heads, query)
        if self._fp8 is not None:
            rope_and_write(qkv, positions, slots, rotation, self._fp8, heads, query)
            WidePages().widen(self._fp8, self._sequences(1), query.dtype)

    def _chunk_attention(self) -> None:
        """Pages of 64 positions have a CUDA kernel; others take Triton's."""
        if self._shape.page_size == prefill_hopper.PAGE:
            return
        query = self._empty(32, self._heads, self._config.head_dim)
        sequences = self._sequences(1)
        for window in (None, self._config.sliding_window):
            prefill_attention(
                *(query, self._cache, sequences, self._sinks(), window, self._config.head_dim**-0.5, 32)
            )

    def _decode_attention(self, batch: int) -> None:
        config = self._config
        query = self._empty(batch, self._heads, config.head_dim)
        kernel = DecodeAttention(
            *(batch, self._heads, self._kv_heads, config.head_dim, self._cache.device), pdl=self._alone
        )
        scale, out, sequences = config.head_dim**-0.5, torch.empty_like(query), self._sequences(batch)
        kernel.full(query, self._cache, sequences, self._sinks(), scale, out)
        kernel.sliding(query, self._cache, sequences, self._sinks(), config.sliding_window, scale, out)
        if self._fp8 is None:
            return
        if self._shape.page_size == fp8_hopper.PAGE:
            # The kernel itself is CUDA's; what merges its splits is not.
            splits = fp8_hopper.choose_fp8_splits(batch, self._kv_heads)
            rows = batch * self._heads
            if splits > 1:
                SplitParts(rows, config.head_dim, splits, self._cache.device, pdl=self._alone).merge(out)
            return
        fp8 = Fp8DecodeAttention(batch, self._heads, self._kv_heads, config.head_dim, self._cache.device)
        fp8.full(query, self._fp8, sequences, self._sinks(), scale, out)

    def _sampling(self, batch: int) -> None:
        draws = self._empty(2, batch, dtype=torch.float64)
        if not self._alone:
            self._sampling_over_ranks(batch, draws)
            return
        logits = self._empty(batch, self._config.vocab_size, dtype=torch.float32)
        sampled = self._empty(batch, dtype=torch.int64)
        choose_tokens(logits, sampled, pdl=True)
        choose_tokens(logits, sampled, draws[0], draws[1], pdl=True)

    def _sampling_over_ranks(self, batch: int, draws: Tensor) -> None:
        """As ``choose_by_kernels`` does, with what would have been gathered."""
        ranks, ids = self._shape.layout.tensor_parallel, self._rank.vocabulary
        logits = self._empty(batch, len(ids), dtype=torch.float32)

        def gathered(mine: Tensor) -> Tensor:
            return self._empty(ranks, *mine.shape, dtype=mine.dtype)

        parts = gathered(best_of_parts(logits, ids.start))
        best_tokens(parts)
        sums = gathered(block_sums(logits, parts, draws[0]))
        drawn_tokens(logits, ids.start, self._shape.layout.rank, parts, sums, *draws)

    def _sinks(self) -> Tensor:
        return self._empty(self._heads, dtype=torch.float32)

    def _sequences(self, batch: int) -> PagedSequences:
        return PagedSequences(
            *(self._zeros(batch, 1), torch.arange(batch + 1, dtype=torch.int32, device=self._device)),
            *(self._zeros(batch) + 1, self._zeros(batch, dtype=torch.int64) - 1),
        )


def launch_all(config: GptOssConfig, shape: WorkerShape, device: torch.device | str) -> None:
    """Launch each kernel as a worker of this shape does; within ``compile_only``, on any device.

    Raises:
        ConfigError: the model cannot be spread this way.
    """
    Launches(config, shape, device).all()


def libraries(shape: WorkerShape) -> tuple[CudaLibrary, ...]:
    """The CUDA libraries that each rank of a worker loads on an H200."""
    pages = (page_copy.LIBRARY, IPC_LIBRARY, *((fp8_hopper.LIBRARY,) if shape.fp8_kv else ()))
    if shape.layout.tensor_parallel == 1:
        return (skinny.LIBRARY, moe_build.LIBRARY, prefill_hopper.LIBRARY, *pages)
    split = () if shape.layout.expert_parallel else (moe_build.SPLIT_LIBRARY,)
    return (prefill_hopper.LIBRARY, moe_build.LIBRARY, *split, peer_reduce.LIBRARY, *pages)


def require_built(config: GptOssConfig, shape: WorkerShape, device: torch.device | str) -> None:
    """Load every kernel of a worker now, and forbid this process to compile any, now or later.

    Raises:
        ConfigError: the model cannot be spread this way.
        KernelLibraryError: some were not built, of which the message names the first ones, or the model takes
            kernels that are not built ahead.
    """
    obstacle = hopper_obstacle(config, torch.device(device))
    if obstacle is not None:
        raise KernelLibraryError(
            f"kernels.require_built: only the Hopper kernels are built ahead, and {obstacle}"
        )
    absent = [library.file_name for library in libraries(shape) if library.find() is None]
    if absent:
        raise KernelLibraryError(_message("CUDA libraries", absent, shape))
    load_only()
    with missing_kernels() as missing:
        launch_all(config, shape, device)
    if missing:
        raise KernelLibraryError(_message(f"Triton kernels of {triton_folder()}", missing, shape))


def _message(what: str, missing: Iterable[str], shape: WorkerShape) -> str:
    names = list(missing)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{what} that were not built: {', '.join(names[:_NAMED])}{more}; run `antiphon kernels build "
        f'--layouts "{shape.layout.name}" --page-size {shape.page_size} '
        f"--max-batch-size {shape.max_batch_size}` where nvcc and gcc are"
    )
