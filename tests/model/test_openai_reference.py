"""The model against OpenAI's own torch implementation (PyPI ``gpt-oss``), which reads the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import load_model
from antiphon.model.checkpoint.synthesize import synthesize

TOLERANCE = 3e-4
"""On logits with a standard deviation of 3, both computed in float32."""
LENGTHS = (1, 127, 128, 129, 130, 300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai") / "tiny"
    synthesize(folder, like="tiny", layout=Layout.OPENAI)
    return folder


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    from gpt_oss.torch.model import Transformer

    return Transformer.from_checkpoint(str(directory), "cpu").float()


def prompt(length: int, vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("chunk", [None, 48], ids=["whole", "chunked"])
@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_logits_equal_openais(
    length: int, chunk: int | None, directory: Path, theirs: Any, forward: Callable[..., Tensor]
) -> None:
    ours = load_model(directory, torch.float32)
    token_ids = prompt(length, ours.config.vocab_size)
    expected = theirs(token_ids)
    assert expected.std() > 1
    logits = ours.logits(forward(ours, token_ids, chunk=chunk))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_the_comparison_would_see_a_sink_and_a_bias(
    directory: Path, theirs: Any, forward: Callable[..., Tensor]
) -> None:
    ours = load_model(directory, torch.float32)
    token_ids = prompt(140, ours.config.vocab_size)
    expected = theirs(token_ids)
    for parameter in (theirs.block[1].attn.sinks, theirs.block[0].mlp.mlp2_bias):
        kept = parameter.clone()
        parameter += 1.0
        assert (theirs(token_ids) - expected).abs().max() > 100 * TOLERANCE
        parameter.copy_(kept)
    torch.testing.assert_close(ours.logits(forward(ours, token_ids)), expected, atol=TOLERANCE, rtol=0)
