"""Every launch of a Triton kernel that a worker on the Hopper road makes, to be compiled or loaded ahead.

Kernels are specialised by the shape of the model and by how a batch is cut up, not by the length of a prompt.
A kernel that a worker meets and that is not launched here would be found missing by ``require_built``'s ban.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.ahead import load_only, triton_folder, without_launches
from antiphon.kernels.attention.decode import DecodeAttention
from antiphon.kernels.cuda_library import KernelLibraryError
from antiphon.kernels.dense.norm import add_rms_norm_, rms_norm
from antiphon.kernels.dense.rope import rope_and_write
from antiphon.kernels.reference import PagedSequences
from antiphon.kernels.router import route
from antiphon.kernels.sampling import choose_tokens
from antiphon.model.config import GptOssConfig
from antiphon.model.cuda_roads import hopper_obstacle

_LONG_CHUNK = 4096
"""Beyond what is routed in small blocks."""


def launch_all(
    config: GptOssConfig,
    device: torch.device | str,
    *,
    page_size: int,
    max_batch_size: int,
) -> None:
    """Launch each kernel as a worker of one rank does; within ``compile_only``, on any device.

    Args:
        page_size: positions of a page.
        max_batch_size: sequences decoded together, at most.
    """
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    cache = empty(1, 2, kv_heads, 2, page_size, width)[:, 0]  # one layer of a group of several
    slots = torch.full((_LONG_CHUNK,), -1, dtype=torch.int64, device=device)
    for tokens in (32, _LONG_CHUNK):
        x, weight = empty(tokens, config.hidden_size), empty(config.hidden_size)
        rms_norm(x, weight, config.rms_norm_eps)
        add_rms_norm_(x, torch.empty_like(x), weight, config.rms_norm_eps)
        router = (empty(config.num_experts, config.hidden_size), empty(config.num_experts))
        route(x, *router, config.experts_per_token)
        route(x, *router, config.experts_per_token, torch.zeros(1, dtype=torch.int32, device=device))
    qkv = empty(32, (heads + 2 * kv_heads) * width)
    rotation = empty(1, width // 2, 2, dtype=torch.float32)
    positions = torch.zeros(32, dtype=torch.int64, device=device)
    rope_and_write(qkv, positions, slots[:32], rotation, cache, heads, empty(32, heads, width))
    for batch in range(1, max_batch_size + 1):
        _decode_attention(config, batch, heads, cache)
        logits = empty(batch, config.vocab_size, dtype=torch.float32)
        sampled = torch.empty(batch, dtype=torch.int64, device=device)
        draws = torch.empty(2, batch, dtype=torch.float64, device=device)
        choose_tokens(logits, sampled, pdl=True)
        choose_tokens(logits, sampled, draws[0], draws[1], pdl=True)


def require_built(
    config: GptOssConfig,
    device: torch.device | str,
    *,
    page_size: int,
    max_batch_size: int,
) -> None:
    """Load every Triton kernel of a worker now, and forbid this process to compile any, now or later.

    Raises:
        KernelLibraryError: one was not built, or the model takes kernels that are not built ahead.
    """
    obstacle = hopper_obstacle(config, torch.device(device))
    if obstacle is not None:
        raise KernelLibraryError(
            f"kernels.require_built: only the Hopper kernels are built ahead, and {obstacle}"
        )
    load_only()
    try:
        with without_launches():
            launch_all(config, device, page_size=page_size, max_batch_size=max_batch_size)
    except PermissionError as error:  # the folder of a kernel that is not there cannot be made
        raise KernelLibraryError(f"a Triton kernel was not built into {triton_folder()}: {error}") from error


def _decode_attention(config: GptOssConfig, batch: int, heads: int, cache: Tensor) -> None:
    device = cache.device
    query = torch.empty(batch, heads, config.head_dim, dtype=torch.bfloat16, device=device)
    sequences = PagedSequences(
        torch.zeros(batch, 1, dtype=torch.int32, device=device),
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.ones(batch, dtype=torch.int32, device=device),
        torch.full((batch,), -1, dtype=torch.int64, device=device),
    )
    sinks = torch.empty(heads, dtype=torch.float32, device=device)
    kernel = DecodeAttention(batch, heads, cache.shape[1], config.head_dim, device, pdl=True)
    scale = config.head_dim**-0.5
    kernel.full(query, cache, sequences, sinks, scale, torch.empty_like(query))
    kernel.sliding(query, cache, sequences, sinks, config.sliding_window, scale, torch.empty_like(query))
