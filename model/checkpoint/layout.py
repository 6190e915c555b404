"""The tensor table: every name, shape and dtype of a GPT-OSS checkpoint, in both published layouts.

A parameter has one name in this project, OpenAI's (``block.3.attn.qkv.weight``). In OpenAI's layout a file
holds it under that name; in Hugging Face's, under another one, and the fused qkv projection is three
tensors there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from antiphon.kernels.reference import MXFP4_BLOCK
from antiphon.model.config import GptOssConfig


class Layout(StrEnum):
    """Whose names the files use."""

    HUGGING_FACE = "huggingface"
    OPENAI = "openai"


class TensorKind(StrEnum):
    """What a tensor is for; bytes are summed by kind."""

    EMBEDDING = "embedding"
    UNEMBEDDING = "unembedding"
    ATTENTION = "attention"
    NORM = "norm"
    ROUTER = "router"
    EXPERT_MATRIX = "expert_matrix"
    EXPERT_SCALE = "expert_scale"
    EXPERT_BIAS = "expert_bias"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a checkpoint must hold.

    Attributes:
        name: as in the file.
        shape: in elements.
        dtypes: safetensors codes that are accepted, the usual one first.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, and the tensors of the files that make it up, concatenated along dimension 0."""

    name: str
    kind: TensorKind
    parts: tuple[TensorSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


_BF16 = ("BF16",)
_BF16_OR_F32 = ("BF16", "F32")  # norms and sinks are computed in float32 and published in either
_U8 = ("U8",)


def parameter_specs(config: GptOssConfig, layout: Layout) -> tuple[ParameterSpec, ...]:
    """Every parameter of a checkpoint of this shape, in the order of the model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    hugging_face = layout is Layout.HUGGING_FACE
    specs = [
        _whole(
            "embedding.weight",
            "model.embed_tokens.weight" if hugging_face else None,
            TensorKind.EMBEDDING,
            (vocab, hidden),
            _BF16,
        )
    ]
    for layer in range(config.num_hidden_layers):
        specs += _attention_specs(config, layer, hugging_face)
        specs += _mlp_specs(config, layer, hugging_face)
    specs += [
        _whole(
            "norm.scale",
            "model.norm.weight" if hugging_face else None,
            TensorKind.NORM,
            (hidden,),
            _BF16_OR_F32,
        ),
        _whole(
            "unembedding.weight",
            "lm_head.weight" if hugging_face else None,
            TensorKind.UNEMBEDDING,
            (vocab, hidden),
            _BF16,
        ),
    ]
    return tuple(specs)


def _whole(
    name: str, stored_as: str | None, kind: TensorKind, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> ParameterSpec:
    return ParameterSpec(name, kind, (TensorSpec(stored_as or name, shape, dtypes),))


def _attention_specs(config: GptOssConfig, layer: int, hugging_face: bool) -> list[ParameterSpec]:
    ours, theirs = f"block.{layer}.attn", f"model.layers.{layer}"
    hidden, query, kv = config.hidden_size, config.query_width, config.kv_width
    rows = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))

    def whole(name: str, stored_as: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> ParameterSpec:
        kind = TensorKind.NORM if name == "norm.scale" else TensorKind.ATTENTION
        renamed = f"{theirs}.{stored_as}" if hugging_face else None
        return _whole(f"{ours}.{name}", renamed, kind, shape, dtypes)

    def fused(leaf: str, tail: tuple[int, ...]) -> ParameterSpec:
        if not hugging_face:
            return whole(f"qkv.{leaf}", "", (query + 2 * kv, *tail), _BF16)
        parts = tuple(TensorSpec(f"{theirs}.self_attn.{p}.{leaf}", (n, *tail), _BF16) for p, n in rows)
        return ParameterSpec(f"{ours}.qkv.{leaf}", TensorKind.ATTENTION, parts)

    return [
        whole("sinks", "self_attn.sinks", (config.num_attention_heads,), _BF16_OR_F32),
        whole("norm.scale", "input_layernorm.weight", (hidden,), _BF16_OR_F32),
        fused("weight", (hidden,)),
        fused("bias", ()),
        whole("out.weight", "self_attn.o_proj.weight", (hidden, query), _BF16),
        whole("out.bias", "self_attn.o_proj.bias", (hidden,), _BF16),
    ]


def _mlp_specs(config: GptOssConfig, layer: int, hugging_face: bool) -> list[ParameterSpec]:
    ours, theirs = f"block.{layer}.mlp", f"model.layers.{layer}"
    experts, hidden, inter = config.num_experts, config.hidden_size, config.intermediate_size
    table = [
        ("norm.scale", "post_attention_layernorm.weight", TensorKind.NORM, (hidden,), _BF16_OR_F32),
        ("gate.weight", "mlp.router.weight", TensorKind.ROUTER, (experts, hidden), _BF16),
        ("gate.bias", "mlp.router.bias", TensorKind.ROUTER, (experts,), _BF16),
    ]
    for ours_matrix, theirs_matrix, rows, cols in (
        ("mlp1", "mlp.experts.gate_up_proj", 2 * inter, hidden),
        ("mlp2", "mlp.experts.down_proj", hidden, inter),
    ):
        scales = (experts, rows, cols // MXFP4_BLOCK)
        blocks = (*scales, MXFP4_BLOCK // 2)
        matrix, scale, bias = TensorKind.EXPERT_MATRIX, TensorKind.EXPERT_SCALE, TensorKind.EXPERT_BIAS
        table += [
            (f"{ours_matrix}_weight.blocks", f"{theirs_matrix}_blocks", matrix, blocks, _U8),
            (f"{ours_matrix}_weight.scales", f"{theirs_matrix}_scales", scale, scales, _U8),
            (f"{ours_matrix}_bias", f"{theirs_matrix}_bias", bias, (experts, rows), _BF16),
        ]
    return [
        _whole(f"{ours}.{name}", f"{theirs}.{stored_as}" if hugging_face else None, kind, shape, dtypes)
        for name, stored_as, kind, shape, dtypes in table
    ]
