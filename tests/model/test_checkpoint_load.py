"""Good checkpoints load completely: every tensor once, either layout, any sharding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from antiphon.model.checkpoint import read as read_module
from antiphon.model.checkpoint.index import open_checkpoint
from antiphon.model.checkpoint.layout import Layout
from antiphon.model.checkpoint.load import fill, load_model, read_parameters
from antiphon.model.checkpoint.safetensors_file import read_header
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.config import GptOssConfig
from antiphon.model.transformer import Transformer
from antiphon.protocol.errors import CheckpointError

Write = Callable[..., Path]
FILE = "model.safetensors"


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("max_shard_bytes", [10**9, 40_000], ids=["one-file", "shards"])
def test_every_tensor_is_read_once(
    layout: Layout, max_shard_bytes: int, write_mini: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_mini(layout=layout, max_shard_bytes=max_shard_bytes)
    reads: Counter[str] = Counter()

    class CountingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> CountingFile:
            self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self._file.__exit__(*args)

        def get_slice(self, name: str) -> Any:
            reads[name] += 1
            return self._file.get_slice(name)

    monkeypatch.setattr(read_module, "safe_open", CountingFile)
    load_model(directory, torch.float32)
    held = [tensor.name for file in sorted(directory.glob("*.safetensors")) for tensor in read_header(file)]
    assert reads == Counter(held)
    reads.clear()
    load_model(directory, torch.float32, with_unembedding=False)
    skipped = "lm_head.weight" if layout is Layout.HUGGING_FACE else "unembedding.weight"
    assert set(held) - set(reads) == {skipped}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(Layout))
def test_what_is_loaded_is_what_was_written(
    layout: Layout, dtype: torch.dtype, write_mini: Write, mini_config: GptOssConfig
) -> None:
    loaded = load_model(write_mini(layout=layout, seed=3), dtype)
    expected = Transformer(mini_config, dtype)
    for parameter in expected.parameters():
        parameter.fill_(math.nan)
    fill(expected, synthesize_parameters(mini_config, seed=3))
    assert loaded.config == mini_config
    for (name, ours), theirs in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.isfinite().all(), name
        assert ours.dtype == (torch.float32 if name.endswith(("scale", "sinks")) else dtype)


def test_layouts_give_equal_logits(write_mini: Write, forward: Callable[..., Tensor]) -> None:
    token_ids = torch.arange(90)
    logits = []
    for layout in Layout:
        model = load_model(write_mini(layout=layout, name=layout), torch.float32)
        logits.append(model.logits(forward(model, token_ids)))
    assert torch.equal(*logits)


def test_model_does_not_depend_on_the_file_after_loading(
    write_mini: Write, forward: Callable[..., Tensor]
) -> None:
    directory = write_mini()
    model = load_model(directory, torch.bfloat16)
    before = model.logits(forward(model, torch.arange(9)))
    with (directory / FILE).open("r+b") as file:
        file.write(b"\0" * (directory / FILE).stat().st_size)
    assert torch.equal(model.logits(forward(model, torch.arange(9))), before)


def test_fill_refuses_an_incomplete_or_doubled_state(mini_config: GptOssConfig, write_mini: Write) -> None:
    index = open_checkpoint(write_mini())
    state = [(name, tensor.clone()) for name, tensor in read_parameters(index)]

    def refused(parameters: list[tuple[str, Tensor]]) -> str:
        with pytest.raises(CheckpointError) as caught:
            fill(Transformer(mini_config, torch.float32), parameters)
        return str(caught.value)

    blocks = next(i for i, (name, _) in enumerate(state) if name.endswith(".blocks"))
    assert refused(state[1:]).startswith("embedding.weight: not given")
    assert "mlp1_weight: not given" in refused(state[:blocks] + state[blocks + 1 :])
    assert refused([*state, state[0]]) == "embedding.weight: given twice"
    assert refused([*state, state[blocks], state[blocks + 1]]).endswith("mlp1_weight: given twice")
    assert refused([*state, ("block.9.x", torch.zeros(1))]) == "block.9.x: the model has no such parameter"
    assert "shape [3], expected [96, 64]" in refused([("embedding.weight", torch.zeros(3))])
