"""The packed model that ships: complete, small, expanded as it was trained, and transformers reads it too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.demo import harmony
from antiphon.demo.cached_checkpoint import DIGEST_FILE, PACKED_FILE, ensure_demo_checkpoint
from antiphon.demo.dialogue import Effort, UserTurn
from antiphon.demo.generate import generate
from antiphon.demo.network import TinyGptOss
from antiphon.demo.packed import load_weights, read_packed
from antiphon.demo.shape import TINY
from antiphon.demo.ship import check
from antiphon.demo.vocabulary import FULL_VOCABULARY, load_vocabulary
from antiphon.model.checkpoint.inspect import inspect
from antiphon.protocol.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("harmony_vocabulary")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_demo_checkpoint(tmp_path_factory.mktemp("cache"))


def prompt(text: str) -> list[int]:
    return harmony.render_prompt((UserTurn(text),), (), Effort.LOW, None, "2026-01-02")


def test_it_is_small_and_expands_to_a_whole_checkpoint(checkpoint: Path) -> None:
    assert check(PACKED_FILE) == json.loads(DIGEST_FILE.read_text())["sha256"]
    assert inspect(checkpoint).ok
    tree = json.loads((checkpoint / "config.json").read_text())
    assert tree["vocab_size"] == FULL_VOCABULARY
    for count in (TINY.num_key_value_heads, TINY.num_experts):
        assert count % 4 == 0
    for size in (TINY.hidden_size, TINY.intermediate_size):
        assert size % 128 == 0


def test_what_may_not_ship_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / PACKED_FILE.name
    broken.write_bytes(PACKED_FILE.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=broken.name):
        check(broken)
    known = load_vocabulary()
    fewer = dataclasses.replace(known, token_ids=known.token_ids[1:])
    with monkeypatch.context() as patch:
        patch.setattr("antiphon.demo.ship.load_vocabulary", lambda _: fewer)
        with pytest.raises(CheckpointError, match="another vocabulary"):
            check(PACKED_FILE)
    monkeypatch.setattr("antiphon.demo.ship.MOST_BYTES", 1_000_000)
    with pytest.raises(CheckpointError, match="at most 1,000,000"):
        check(PACKED_FILE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_transformers_answers_as_the_trained_model_does_and_never_with_an_unseen_token(
    checkpoint: Path,
) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    theirs: Any = GptOssForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    packed, vocabulary = read_packed(PACKED_FILE), load_vocabulary()
    trained = TinyGptOss(packed.config, vocabulary.unseen, vocabulary.unseen_tokens)
    load_weights(trained, packed.weights)
    prompts = [prompt("What is the capital of France?"), prompt("What is 47 + 38?")]
    answers = generate(trained, vocabulary, prompts, max_tokens=96)
    unseen = torch.ones(FULL_VOCABULARY, dtype=torch.bool)
    unseen[list(vocabulary.token_ids)] = False
    for asked, answer in zip(prompts, answers, strict=True):
        assert answer[-1] == harmony.RETURN
        with torch.no_grad():
            logits = theirs(torch.tensor([[*asked, *answer[:-1]]]), logits_to_keep=len(answer)).logits[0]
        assert logits.argmax(-1).tolist() == answer
        chance = logits.softmax(-1)[:, unseen].sum(-1)
        assert chance.max() < 1e-3
    texts = [harmony.encoding().decode(answer) for answer in answers]
    assert "Paris" in texts[0]
    assert "= 85" in texts[1]
