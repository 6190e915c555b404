"""config.json of both layouts, to and from GptOssConfig."""

from __future__ import annotations

import json
from pathlib import Path

from antiphon.kernels.reference import SWIGLU_ALPHA
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.config import DEFAULT_EOS_TOKEN_IDS, GptOssConfig
from antiphon.protocol.errors import CheckpointError, ConfigError

CONFIG_NAME = "config.json"
_MODEL_TYPE = "gpt_oss"
_OPENAI_KEYS = ("num_experts", "experts_per_token", "initial_context_length")


def read_config(directory: Path) -> tuple[GptOssConfig, Layout]:
    """The model's shape, and whose layout the folder uses (told by the keys of its config.json).

    Raises:
        CheckpointError: no config.json, not JSON, a missing key, a value of the wrong type, or a value that
            this implementation does not compute; the message names the file, the key and the value.
    """
    path = directory / CONFIG_NAME
    fields = _Fields(path, read_json_object(path))
    try:
        if fields.has("model_type"):
            return _from_hugging_face(fields), Layout.HUGGING_FACE
        if all(fields.has(key) for key in _OPENAI_KEYS):
            return _from_openai(fields), Layout.OPENAI
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    raise CheckpointError(
        f"{path}: neither a Hugging Face config (no model_type) nor OpenAI's own (needs "
        f"{', '.join(_OPENAI_KEYS)})"
    )


def read_json_object(path: Path) -> dict[str, object]:
    """One JSON object from a file.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree


class _Fields:
    """Typed access to the keys of one JSON object, with errors that name file, key and value."""

    def __init__(self, path: Path, tree: dict[str, object], prefix: str = "") -> None:
        self._path = path
        self._tree = tree
        self._prefix = prefix

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {self._prefix}{key}: {problem}")

    def has(self, key: str) -> bool:
        return self._tree.get(key) is not None

    def get(self, key: str) -> object:
        if not self.has(key):
            raise self.fail(key, "missing")
        return self._tree[key]

    def integer(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, found {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"expected a number, found {value!r}")
        return float(value)

    def section(self, key: str) -> _Fields:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object, found {value!r}")
        return _Fields(self._path, value, f"{self._prefix}{key}.")

    def require(self, key: str, expected: object, default: object = None) -> None:
        """Refuse any value but ``expected``; an absent key counts as ``default``."""
        value = self._tree.get(key, default)
        if value != expected:
            raise self.fail(key, f"{value!r} is not supported, only {expected!r}")


def _from_hugging_face(fields: _Fields) -> GptOssConfig:
    fields.require("model_type", _MODEL_TYPE)
    fields.require("tie_word_embeddings", False, default=False)
    fields.require("attention_bias", True, default=True)
    fields.require("hidden_act", "silu", default="silu")
    fields.require("swiglu_alpha", SWIGLU_ALPHA, default=SWIGLU_ALPHA)
    if not fields.has("quantization_config"):
        raise fields.fail("quantization_config", "missing; only checkpoints with MXFP4 experts are supported")
    fields.section("quantization_config").require("quant_method", "mxfp4")
    layers = fields.integer("num_hidden_layers")
    _check_layer_types(fields, layers)
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    rope.require("rope_type", "yarn")
    rope.require("truncate", False, default=True)
    eos = _eos_token_ids(fields)
    return GptOssConfig(
        num_hidden_layers=layers,
        num_experts=fields.integer("num_local_experts"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        sliding_window=fields.integer("sliding_window"),
        max_context_tokens=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        swiglu_limit=fields.number("swiglu_limit"),
        rope_theta=(rope if rope.has("rope_theta") else fields).number("rope_theta"),
        rope_scaling_factor=rope.number("factor"),
        rope_original_context=rope.integer("original_max_position_embeddings"),
        rope_beta_fast=rope.number("beta_fast"),
        rope_beta_slow=rope.number("beta_slow"),
        eos_token_ids=eos,
        pad_token_id=fields.integer("pad_token_id"),
    )


def _check_layer_types(fields: _Fields, layers: int) -> None:
    found = fields.get("layer_types")
    wanted = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not isinstance(found, list) or len(found) != layers:
        raise fields.fail("layer_types", f"expected {layers} entries, one per layer, found {found!r}")
    for layer, (have, want) in enumerate(zip(found, wanted, strict=True)):
        if have != want:
            raise fields.fail("layer_types", f"layer {layer} is {have!r}, only {want!r} is supported there")


def _eos_token_ids(fields: _Fields) -> tuple[int, ...]:
    """Ids that end generation: one in config.json's eos_token_id, all of them in its defaults."""
    value = fields.get("eos_token_id")
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise fields.fail("eos_token_id", f"expected a token id or a list of them, found {value!r}")
    # The published config.json names <|return|> alone; its generation_config.json adds the other two.
    return tuple(dict.fromkeys((*ids, *DEFAULT_EOS_TOKEN_IDS)))


def _from_openai(fields: _Fields) -> GptOssConfig:
    factor, original = fields.number("rope_scaling_factor"), fields.integer("initial_context_length")
    return GptOssConfig(
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_experts=fields.integer("num_experts"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        experts_per_token=fields.integer("experts_per_token"),
        sliding_window=fields.integer("sliding_window"),
        max_context_tokens=round(factor * original),
        swiglu_limit=fields.number("swiglu_limit"),
        rope_theta=fields.number("rope_theta"),
        rope_scaling_factor=factor,
        rope_original_context=original,
        # OpenAI counts rotations the other way round: alpha is the slow end, beta the fast one.
        rope_beta_slow=fields.number("rope_ntk_alpha"),
        rope_beta_fast=fields.number("rope_ntk_beta"),
    )


def config_tree(config: GptOssConfig, layout: Layout) -> dict[str, object]:
    """What config.json of this layout says about a model; ``read_config`` reads it back.

    OpenAI's layout has no key for the context (it is initial_context_length * rope_scaling_factor).
    """
    shared: dict[str, object] = {
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
        "initial_context_length": config.rope_original_context,
        "rope_theta": config.rope_theta,
        "experts_per_token": config.experts_per_token,
    }
    if layout is Layout.OPENAI:
        return {
            **shared,
            "num_experts": config.num_experts,
            "rope_scaling_factor": config.rope_scaling_factor,
            "rope_ntk_alpha": config.rope_beta_slow,
            "rope_ntk_beta": config.rope_beta_fast,
        }
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": _MODEL_TYPE,
        **shared,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.pad_token_id,
        "layer_types": [
            "sliding_attention" if config.is_sliding(i) else "full_attention"
            for i in range(config.num_hidden_layers)
        ],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": config.rope_scaling_factor,
            "original_max_position_embeddings": config.rope_original_context,
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
