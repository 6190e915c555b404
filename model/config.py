"""GPT-OSS architecture constants, as typed fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """Shape and constants of one GPT-OSS model; defaults are those shared by the published sizes."""

    num_hidden_layers: int
    num_experts: int
    vocab_size: int = 201_088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    experts_per_token: int = 4
    sliding_window: int = 128
    """Keys visible to a query of a sliding layer, itself included. Even layers slide, odd ones are full."""
    max_context_tokens: int = 131_072
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    rope_theta: float = 150_000.0
    rope_scaling_factor: float = 32.0
    rope_original_context: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    eos_token_ids: tuple[int, ...] = (200_002, 199_999, 200_012)
    pad_token_id: int = 199_999

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer sees only the window."""
        return layer % 2 == 0

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Indices of sliding layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_sliding(i))

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of full-attention layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_sliding(i))
