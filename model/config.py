"""GPT-OSS architecture constants, as typed fields."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.protocol.errors import ConfigError

DEFAULT_EOS_TOKEN_IDS = (200_002, 199_999, 200_012)
"""<|return|>, <|endoftext|>, <|call|>. <|end|> closes a message and does not stop generation."""


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
    eos_token_ids: tuple[int, ...] = DEFAULT_EOS_TOKEN_IDS
    pad_token_id: int = 199_999

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in self._sizes().items() if value < 1}
        if sizes:
            raise ConfigError("; ".join(f"{name} must be at least 1, found {v}" for name, v in sizes.items()))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embedding needs two halves")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}"
            )
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % MXFP4_BLOCK:
                raise ConfigError(f"{name} {getattr(self, name)} is not a multiple of {MXFP4_BLOCK} (MXFP4)")

    def _sizes(self) -> dict[str, int]:
        """Every field that counts something."""
        return {
            "num_hidden_layers": self.num_hidden_layers,
            "num_experts": self.num_experts,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "experts_per_token": self.experts_per_token,
            "sliding_window": self.sliding_window,
            "max_context_tokens": self.max_context_tokens,
            "rope_original_context": self.rope_original_context,
        }

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer sees only the window."""
        return layer % 2 == 0

    @property
    def query_width(self) -> int:
        """Columns of all query heads; not the hidden size."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Indices of sliding layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_sliding(i))

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of full-attention layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_sliding(i))


PRESETS = MappingProxyType(
    {
        "tiny": GptOssConfig(
            num_hidden_layers=4,
            num_experts=8,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_context_tokens=16_384,
        ),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_experts=32),
        "gpt-oss-120b": GptOssConfig(num_hidden_layers=36, num_experts=128),
    }
)
"""The published sizes, and a small one of the same architecture (and vocabulary) for CPUs and tests.

Tiny has at least 4 of everything that tensor or expert parallelism splits over 4 ranks.
"""


def preset(name: str) -> GptOssConfig:
    """The shape called ``name``.

    Raises:
        ConfigError: no such preset; the message lists those there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"{name!r} is not a known model shape; known: {', '.join(PRESETS)}")
    return PRESETS[name]
