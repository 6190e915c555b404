"""config.json of both layouts: read back as written, and refused by key and value where not supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.model.checkpoint.config_json import config_tree, read_config
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.config import PRESETS, GptOssConfig, preset
from antiphon.protocol.errors import CheckpointError, ConfigError

PUBLISHED_OPENAI_20B = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}


def write(directory: Path, tree: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(tree))
    return directory


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("layout", list(Layout))
def test_reads_back_what_it_wrote(name: str, layout: Layout, tmp_path: Path) -> None:
    config = preset(name)
    if layout is Layout.OPENAI:  # which derives the context from the rotary constants
        config = replace(config, max_context_tokens=131_072)
    assert read_config(write(tmp_path, config_tree(config, layout))) == (config, layout)


def test_every_field_is_read_and_none_is_a_default(tmp_path: Path) -> None:
    odd = GptOssConfig(
        num_hidden_layers=3,
        num_experts=6,
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        experts_per_token=2,
        sliding_window=33,
        max_context_tokens=777,
        rms_norm_eps=1e-6,
        swiglu_limit=5.0,
        rope_theta=10_000.0,
        rope_scaling_factor=8.0,
        rope_original_context=512,
        rope_beta_fast=16.0,
        rope_beta_slow=2.0,
        eos_token_ids=(7, *GptOssConfig(1, 4).eos_token_ids),
        pad_token_id=9,
    )
    assert read_config(write(tmp_path, config_tree(odd, Layout.HUGGING_FACE)))[0] == odd


def test_published_openai_config(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, PUBLISHED_OPENAI_20B)) == (preset("gpt-oss-20b"), Layout.OPENAI)


def test_newer_transformers_keep_theta_with_the_rotary_parameters(tmp_path: Path) -> None:
    tree = config_tree(preset("tiny"), Layout.HUGGING_FACE)
    scaling = tree.pop("rope_scaling")
    assert isinstance(scaling, dict)
    tree["rope_parameters"] = {**scaling, "rope_theta": tree.pop("rope_theta")}
    assert read_config(write(tmp_path, tree))[0] == preset("tiny")


def test_transformers_reads_the_same_constants(tmp_path: Path) -> None:
    from transformers import GptOssConfig as TheirConfig

    config = preset("gpt-oss-120b")
    theirs = TheirConfig.from_pretrained(write(tmp_path, config_tree(config, Layout.HUGGING_FACE)))
    assert (theirs.num_hidden_layers, theirs.num_local_experts) == (36, 128)
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["truncate"] is False
    assert theirs.sliding_window == config.sliding_window


def without(key: str) -> Callable[[Any], None]:
    return lambda tree: tree.pop(key)


def with_value(key: str, value: object) -> Callable[[Any], None]:
    return lambda tree: tree.update({key: value})


def with_rope(key: str, value: object) -> Callable[[Any], None]:
    return lambda tree: tree["rope_scaling"].update({key: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_value("model_type", "llama"), "model_type: 'llama' is not supported, only 'gpt_oss'"),
        (with_rope("truncate", True), "rope_scaling.truncate: True is not supported, only False"),
        (lambda t: t["rope_scaling"].pop("truncate"), "rope_scaling.truncate: True is not supported"),
        (with_rope("rope_type", "linear"), "rope_scaling.rope_type: 'linear' is not supported, only 'yarn'"),
        (without("rope_scaling"), "rope_scaling: missing"),
        (with_value("rope_scaling", 3), "rope_scaling: expected an object, found 3"),
        (with_rope("factor", "32"), "rope_scaling.factor: expected a number, found '32'"),
        (with_value("layer_types", ["full_attention"] * 4), "layer_types: layer 0 is 'full_attention'"),
        (with_value("layer_types", ["sliding_attention"]), "layer_types: expected 4 entries"),
        (without("layer_types"), "layer_types: missing"),
        (with_value("tie_word_embeddings", True), "tie_word_embeddings: True is not supported"),
        (with_value("attention_bias", False), "attention_bias: False is not supported"),
        (with_value("hidden_act", "gelu"), "hidden_act: 'gelu' is not supported"),
        (with_value("swiglu_alpha", 1.0), "swiglu_alpha: 1.0 is not supported"),
        (
            with_value("quantization_config", {"quant_method": "awq"}),
            "quant_method: 'awq' is not",
        ),
        (without("quantization_config"), "quantization_config: missing; only checkpoints with MXFP4 experts"),
        (without("num_local_experts"), "num_local_experts: missing"),
        (with_value("hidden_size", "128"), "hidden_size: expected an integer, found '128'"),
        (with_value("hidden_size", True), "hidden_size: expected an integer, found True"),
        (with_value("hidden_size", 100), "hidden_size 100 is not a multiple of 32"),
        (with_value("num_key_value_heads", 3), "8 is not a multiple of num_key_value_heads 3"),
        (with_value("num_experts_per_tok", 9), "experts_per_token 9 exceeds num_experts 8"),
        (with_value("head_dim", 63), "head_dim 63 is odd"),
        (with_value("sliding_window", 0), "sliding_window must be at least 1, found 0"),
        (with_value("sliding_window", None), "sliding_window: missing"),
        (with_value("eos_token_id", "x"), "eos_token_id: expected a token id"),
    ],
)
def test_unsupported_value_is_named(change: Callable[[Any], None], text: str, tmp_path: Path) -> None:
    tree = config_tree(preset("tiny"), Layout.HUGGING_FACE)
    change(tree)
    with pytest.raises(CheckpointError) as caught:
        read_config(write(tmp_path, tree))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not valid JSON"),
        ("3", "expected a JSON object, found int"),
        ("{}", "neither a Hugging Face config"),
        ("\xff", "not valid JSON"),
    ],
)
def test_unusable_file(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=text):
        read_config(tmp_path)


def test_openai_config_with_a_missing_key(tmp_path: Path) -> None:
    tree = {key: value for key, value in PUBLISHED_OPENAI_20B.items() if key != "rope_ntk_beta"}
    with pytest.raises(CheckpointError, match="rope_ntk_beta: missing"):
        read_config(write(tmp_path, tree))


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tiny, gpt-oss-20b, gpt-oss-120b"):
        preset("gpt-oss-7b")


def test_tiny_splits_over_four_ranks() -> None:
    tiny = preset("tiny")
    for size in (
        tiny.num_attention_heads,
        tiny.num_key_value_heads,
        tiny.num_experts,
        tiny.hidden_size,
        tiny.intermediate_size,
    ):
        assert size % 4 == 0
    assert tiny.hidden_size % 128 == 0
    assert tiny.intermediate_size % 128 == 0
    assert tiny.num_attention_heads > tiny.num_key_value_heads
    assert tiny.num_hidden_layers >= 4
    assert tiny.max_context_tokens >= 4096
    assert tiny.vocab_size == preset("gpt-oss-20b").vocab_size
