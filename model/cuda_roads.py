"""Which family of kernels runs a model, decided from its shape and the device alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from antiphon.kernels.attention import fp8_hopper, prefill_hopper
from antiphon.kernels.dense import skinny
from antiphon.kernels.moe import build as moe_build
from antiphon.kernels.moe.decode import SWIGLU_LIMIT
from antiphon.kernels.moe.expert_range import MAX_EXPERTS, TOP_K
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import ConfigError


class Road(StrEnum):
    """Which family of kernels a model runs on."""

    HOPPER = "hopper"
    """Kernels made for the published models' shape on sm_90."""
    PORTABLE = "portable"
    """Triton and cuBLAS, for any shape."""


@dataclass(frozen=True, slots=True)
class ChunkChoices:
    """How the Hopper road multiplies long chunks, beyond where their FP8 experts come from.

    Attributes:
        fp8_projections: hold the attention's projections in FP8 too, and take those for long chunks.
        expert_tile: tokens of an expert's tile; None chooses by what was measured.
    """

    fp8_projections: bool = False
    expert_tile: int | None = None


def hopper_obstacle(config: GptOssConfig, device: torch.device) -> str | None:
    """Why the kernels made for Hopper cannot run this model here; None when they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"{device} is sm_{capability[0]}{capability[1]}, they need sm_90"
    return hopper_shape_obstacle(config)


def hopper_shape_obstacle(config: GptOssConfig) -> str | None:
    """What of the model's shape those kernels are not made for; None when nothing. Needs no GPU."""
    made_for = {
        "hidden_size": skinny.HIDDEN,
        "intermediate_size": skinny.HIDDEN,
        "num_attention_heads": skinny.QUERY_WIDTH // prefill_hopper.HEAD_DIM,
        "num_key_value_heads": skinny.QUERY_WIDTH // prefill_hopper.HEAD_DIM // prefill_hopper.GROUP,
        "head_dim": prefill_hopper.HEAD_DIM,
        "experts_per_token": TOP_K,
        "swiglu_limit": SWIGLU_LIMIT,
    }
    for name, value in made_for.items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)}, they are made for {value}"
    if config.num_experts > MAX_EXPERTS:
        return f"num_experts is {config.num_experts}, they are made for at most {MAX_EXPERTS}"
    if config.num_experts % 2:
        return f"num_experts is {config.num_experts}, they are made for an even number"
    if config.sliding_window < prefill_hopper.PAGE:
        return f"sliding_window is {config.sliding_window}, they are made for at least {prefill_hopper.PAGE}"
    return None


def require_fp8_pages(device: torch.device) -> None:
    """Have what FP8 pages need on this GPU.

    Raises:
        ConfigError: it does not know e4m3 numbers.
        KernelLibraryError: the kernels for FP8 pages on an H200 were not built.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        fp8_hopper.LIBRARY.load()
    if capability < (8, 9):
        raise ConfigError(
            f"model.kv_dtype fp8_e4m3: {device} is sm_{capability[0]}{capability[1]}, "
            "e4m3 numbers need sm_89 or later"
        )


def choose_road(config: GptOssConfig, device: torch.device) -> Road:
    """The fastest one that can run the model there."""
    return Road.HOPPER if hopper_obstacle(config, device) is None else Road.PORTABLE


def load_libraries() -> None:
    """Load what the Hopper road needs of CUDA.

    Raises:
        KernelLibraryError: a library was not built.
    """
    skinny.LIBRARY.load()
    moe_build.LIBRARY.load()
    prefill_hopper.LIBRARY.load()
